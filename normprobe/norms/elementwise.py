"""Maps of each element on its own: pass-through, learned scale and shift, bounded stand-ins for norms."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from normprobe.norms.affine import Match, bias_match, describe, match
from normprobe.norms.fit import evaluate, linear_form, odd_parts, rows
from normprobe.norms.subject import Instance, Subject
from normprobe.records import NormSpec

SEED = 1
_FAR = 1e5  # input at which a bounded map has reached its limit
TINY = 1e-3  # of the way between the limits: less is no movement


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
    """dyt: rising or falling from one limit to another, around an offset that is none or a parameter, by an extent
    that is 1 or a parameter (or else odd around its offset), with parameters that matter."""
    ends = _limits(subject, exact)
    if ends is None or not _matter(subject, exact, inputs):
        return None
    low, high = (end[:1] if end.ndim > 1 else end for end in ends)
    extent, offset = (high - low) / 2, (high + low) / 2
    largest = float(extent.abs().amax())
    centre = bias_match(offset, largest, exact.tensors)
    affine = describe(_extent(extent, exact.tensors), offset, largest, exact.tensors)
    if centre is None or (affine.form == "other" and odd_parts(exact, inputs, subject.device) is None):
        return None
    told = (
        f"bounded pointwise: monotone, bounded by {largest:.3g} around its offset, no statistics; limit: {affine.note}"
    )
    return NormSpec(
        kind="dyt",
        affine=affine.form,
        weight=affine.weight,
        bias=affine.bias,
        device=subject.device.type,
        evidence=(told,),
    )


def _limits(subject: Subject, exact: Instance) -> tuple[Tensor, Tensor] | None:
    """Outputs for very negative and very large inputs; None where the map is not monotone between two such limits."""
    near = range(-9, 10)
    values = torch.tensor([-8 * _FAR, -_FAR, *near, _FAR, 8 * _FAR], dtype=torch.float64, device="cpu")
    ramp = values.view(-1, *[1] * len(subject.shape)).expand(-1, *subject.shape)
    outputs = evaluate(exact, ramp, subject.device)
    reach = (outputs[-1] - outputs[0]).abs()
    flat = TINY * float(reach.amax())
    if not flat > 0 or float((outputs[[0, -1]] - outputs[[1, -2]]).abs().amax()) > flat:
        return None
    steps = outputs.diff(dim=0) * (outputs[-1] - outputs[0]).sign()
    return (outputs[0], outputs[-1]) if float(steps.amin()) >= -flat else None


def _extent(extent: Tensor, tensors: Mapping[str, Tensor]) -> Match | None:
    """The tensor that a limit is in magnitude: a negative factor on the input turns the sign."""
    found = match(extent.abs(), {name: tensor.abs() for name, tensor in tensors.items()})
    if found is not None and not found.one_plus:
        return found
    added = match(extent.abs(), {name: (tensor + 1).abs() for name, tensor in tensors.items()})
    return Match(added.name, one_plus=True) if added is not None and added.name and not added.one_plus else None


def _matter(subject: Subject, exact: Instance, inputs: Tensor) -> bool:
    """Whether the outputs depend on the parameters."""
    if not exact.parameters:
        return False
    other = subject.instance(exact.dtype, SEED + 6)
    outputs, changed = (evaluate(each, inputs, subject.device) for each in (exact, other))
    return not torch.equal(outputs, changed)
