"""Which tensors the recovered gain and offset are."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from math import prod

import torch
from torch import Tensor

from normprobe.records.norms import AffineForm

MATCH = 2e-3  # of the largest gain; random gains are multiples of 1/128


@dataclass(frozen=True)
class Match:
    """`value = factor · tensor`, `factor · (1 + tensor)` (`one_plus`), or the constant `factor` (no name)."""

    name: str | None
    one_plus: bool = False
    factor: float = 1.0
    scalar: bool = False


def match(value: Tensor, tensors: Mapping[str, Tensor], factors: Sequence[float] = (1.0,)) -> Match | None:
    """The tensor that `value` is, laid out along some run of its axes; None where it is none of them.

    Args:
        value: gain or offset, float64, any shape, axes of size 1 where it is constant by construction.
        tensors: candidates by name, preferred in this order.
        factors: constants by which the value may be multiplied, preferred in this order.
    """
    largest = float(value.abs().amax())
    for factor in factors:
        if float((value - factor).abs().amax()) <= MATCH * max(largest, abs(factor)):
            return Match(None, factor=factor)
        for name, tensor in tensors.items():
            for placed in placements(tensor.detach().to("cpu", torch.float64), tuple(value.shape)):
                for one_plus in (False, True):
                    wanted = factor * (placed + 1 if one_plus else placed)
                    if float((value - wanted).abs().amax()) <= MATCH * largest:
                        return Match(name, one_plus, factor, tensor.numel() == 1)
    return None


def placements(tensor: Tensor, shape: tuple[int, ...]) -> Iterator[Tensor]:
    """Every way to lay `tensor` along some axes of `shape` in their order, broadcasting over the rest."""
    if tensor.numel() == 1:
        yield tensor.reshape(())
        return
    long = [axis for axis, size in enumerate(shape) if size > 1]
    for count in range(1, len(long) + 1):
        for axes in combinations(long, count):
            if prod(shape[axis] for axis in axes) == tensor.numel():
                yield tensor.reshape([size if axis in axes else 1 for axis, size in enumerate(shape)])


@dataclass(frozen=True)
class Affine:
    """How gain and offset are stored, and a sentence on what was compared."""

    form: AffineForm
    weight: str | None
    bias: str | None
    factor: float
    scalar: bool
    note: str


def describe(gain: Match | None, offset: Tensor, scale: float, tensors: Mapping[str, Tensor]) -> Affine:
    """Name the affine form from the matched gain and the offset.

    A constant factor on the gain belongs to the statistic or to another argument, not to the affine form.

    Args:
        gain: the matched gain, None where it matches nothing.
        offset: float64, laid out as the gain.
        scale: the largest output, below `MATCH` of which an offset counts as none.
        tensors: the instance's tensors.
    """
    bias = bias_match(offset, scale, tensors, 1.0 if gain is None else gain.factor)
    if gain is None or bias is None:
        what = "gain" if gain is None else "offset"
        name = None if gain is None else gain.name
        return Affine("other", name, None, 1.0, False, f"{what} is no parameter, nor 1 plus one")
    note = _gain_note(gain) + (f", offset = {bias.name}" if bias.name else ", no offset")
    if gain.name is None:
        form: AffineForm = "none" if bias.name is None else "other"
        return Affine(form, None, bias.name, gain.factor, True, note)
    form = FORMS[gain.one_plus, bias.name is not None]
    return Affine(form, gain.name, bias.name, gain.factor, gain.scalar, note)


FORMS: dict[tuple[bool, bool], AffineForm] = {
    (False, False): "weight",
    (False, True): "weight+bias",
    (True, False): "one_plus_weight",
    (True, True): "one_plus_weight+bias",
}


def bias_match(offset: Tensor, scale: float, tensors: Mapping[str, Tensor], factor: float = 1.0) -> Match | None:
    """The tensor that is added, possibly before the constant `factor` was multiplied; no name where nothing is added,
    None where it is no tensor."""
    if float(offset.abs().amax()) <= MATCH * scale * 0.1:
        return Match(None)
    found = match(offset, tensors, (1.0, factor))
    return found if found is not None and found.name is not None and not found.one_plus else None


def _gain_note(gain: Match) -> str:
    times = "" if gain.factor == 1.0 else f"{gain.factor:.6g} · "
    if gain.name is None:
        return f"gain = {gain.factor:.6g}"
    return f"gain = {times}(1 + {gain.name})" if gain.one_plus else f"gain = {times}{gain.name}"
