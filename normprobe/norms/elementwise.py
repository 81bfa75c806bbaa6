"""Maps of each element on its own: pass-through, learned scale and shift, bounded stand-ins for norms."""

from __future__ import annotations

import torch
from torch import Tensor

from normprobe.norms.affine import describe, match
from normprobe.norms.fit import evaluate, linear_form, odd_parts, rows
from normprobe.norms.subject import Instance, Subject
from normprobe.records import NormSpec

SEED = 1
_FAR = 1e5  # input at which a bounded map has reached its limit


def identify(subject: Subject, exact: Instance) -> NormSpec | None:
    """Identity, affine or dyt for a subject whose every output depends on its own input alone, else None."""
    inputs = rows(subject.shape, SEED + 4)
    outputs = evaluate(exact, inputs, subject.device)
    if torch.equal(outputs, inputs.to(exact.dtype).double()):
        return _identity(subject, exact, inputs)
    form = linear_form(exact, subject)
    if form is None:
        return _bounded(subject, exact, inputs)
    if not exact.tensors:
        return None
    gain, offset = form
    affine = describe(match(gain, exact.tensors), offset, float(outputs.abs().amax()), exact.tensors)
    told = f"output is linear in its own input alone; {affine.note}"
    return NormSpec(
        kind="affine",
        affine=affine.form,
        weight=affine.weight,
        bias=affine.bias,
        device=subject.device.type,
        evidence=(told,),
    )


def _identity(subject: Subject, exact: Instance, inputs: Tensor) -> NormSpec | None:
    trained = subject.instance(exact.dtype, SEED, train=True)
    if not torch.equal(evaluate(trained, inputs, subject.device), inputs.to(exact.dtype).double()):
        return None
    told = "output equals input bit for bit, in eval and train mode"
    return NormSpec(kind="identity", device=subject.device.type, evidence=(told,))


def _bounded(subject: Subject, exact: Instance, inputs: Tensor) -> NormSpec | None:
    """dyt: odd around its offset, flat for large inputs, with parameters that matter."""
    parts = odd_parts(exact, inputs, subject.device)
    if parts is None or not _matter(subject, exact, inputs):
        return None
    far = torch.full((2, *subject.shape), _FAR, dtype=torch.float64)
    far[1] *= 8
    limit, further = evaluate(exact, far, subject.device) - parts.even
    largest = float(limit.abs().amax())
    if not largest > 0 or not float((limit - further).abs().amax()) <= 1e-3 * largest:
        return None
    row, offset = (limit[:1], parts.even[:1]) if limit.ndim > 1 else (limit, parts.even)
    magnitudes = {name: tensor.abs() for name, tensor in exact.tensors.items()}
    gain = match(row.abs(), magnitudes)  # a negative alpha turns the sign
    affine = describe(gain, offset, largest, exact.tensors)
    told = f"odd around its offset, bounded by {largest:.3g}, no statistics; limit: {affine.note}"
    return NormSpec(
        kind="dyt",
        affine=affine.form,
        weight=affine.weight,
        bias=affine.bias,
        device=subject.device.type,
        evidence=(told,),
    )


def _matter(subject: Subject, exact: Instance, inputs: Tensor) -> bool:
    """Whether the outputs depend on the parameters."""
    if not exact.parameters:
        return False
    other = subject.instance(exact.dtype, SEED + 6)
    outputs, changed = (evaluate(each, inputs, subject.device) for each in (exact, other))
    return not torch.equal(outputs, changed)
