"""Facts that two norms at the same place do not share, with their gains as they act."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from normprobe.diffing.facts import ERROR, NOTE, WARNING, Said, difference, same
from normprobe.diffing.pairs import NormPair
from normprobe.records import NormSite, Skipped

_FUNCTION = ("kind", "subtracts_mean", "unbiased", "axes", "size", "groups", "batch_dependent")
_UNKNOWN = ("unknown", None)
_HALF = 2.0**-8  # what rounding to bfloat16 changes a number by at most
_TWICE = 2.0  # roundings: one of the stored weight, one of 1 + w
_SMALL = 1e-3
_FORMS = {"one_plus_weight": 1.0, "one_plus_weight+bias": 1.0}
_FUSED = {"fused", "none"}
Named = Mapping[str, Tensor]


def norm_facts(pair: NormPair, a: Named | None, b: Named | None) -> Said:
    """What one pair of norms does not share.

    Args:
        pair: the norms.
        a: parameters and buffers of the first model by name; None where they hold no values.
        b: those of the second model.
    """
    one, other, where = pair.a, pair.b, (pair.a.path, pair.b.path)
    for fact in _FUNCTION:
        values = getattr(one, fact), getattr(other, fact)
        if values[0] != values[1]:
            known = not any(value in _UNKNOWN for value in values) or fact in ("groups", "size")
            yield from _said(fact, ERROR, values, where, known)
    yield from _eps(one, other, where)
    yield from _rounding(one, other, where)
    yield from _gains(one, other, where, a, b)


def _said(fact: str, severity: Any, values: tuple[Any, Any], where: tuple[str, str], known: bool) -> Said:
    shown = tuple(", ".join(map(str, value)) if isinstance(value, tuple) else value for value in values)
    if known:
        yield difference("norm", fact, severity, (shown[0], shown[1]), where)
    else:
        yield Skipped(what=f"{fact.replace('_', ' ')} of norms {where[0]} and {where[1]}", why="unknown in one of them")


def _eps(a: NormSite, b: NormSite, where: tuple[str, str]) -> Said:
    if "unknown" in (a.eps_placement, b.eps_placement):
        if (a.eps, a.eps_placement) != (b.eps, b.eps_placement):
            yield from _said("eps", ERROR, (a.eps, b.eps), where, known=False)
        return
    if a.eps_placement != b.eps_placement:
        yield difference("norm", "eps_placement", ERROR, (a.eps_placement, b.eps_placement), where)
    if not same(a.eps, b.eps):
        yield difference("norm", "eps", ERROR, (a.eps, b.eps), where)


def _rounding(a: NormSite, b: NormSite, where: tuple[str, str]) -> Said:
    """Where the mean square is taken and the gain multiplied; a kernel of its own does both in one, at full width."""
    casts = a.weight_multiply, b.weight_multiply
    fused = bool({*casts} & _FUSED)
    if casts[0] != casts[1] and not ("none" in casts and "fused" not in casts):
        yield from _said("weight_multiply", NOTE if fused else WARNING, casts, where, "unknown" not in casts)
    sums = a.reduction, b.reduction
    if sums[0] != sums[1]:
        wide = {*sums} <= {"float32", "native"}
        yield from _said("reduction", NOTE if wide else WARNING, sums, where, "unknown" not in sums)


def _gains(a: NormSite, b: NormSite, where: tuple[str, str], named_a: Named | None, named_b: Named | None) -> Said:
    forms = a.affine, b.affine
    gains = None if named_a is None else _effective(a, named_a), None if named_b is None else _effective(b, named_b)
    if gains[0] is None or gains[1] is None:
        if forms[0] != forms[1]:
            why = "their gains could not be compared: there are no values, or their form is unknown"
            yield difference("norm", "affine", WARNING, forms, where)
            yield Skipped(what=f"gains of norms {where[0]} and {where[1]}", why=why)
        return
    distance = max(_distance(x, y) for x, y in zip(gains[0], gains[1], strict=True))
    limit = max(_TWICE * finest for finest in (_spacing(a, named_a), _spacing(b, named_b)))
    if distance <= limit:
        if forms[0] != forms[1]:
            told = f"gain and offset are stored as {forms[0]} in A and {forms[1]} in B, and act alike"
            yield difference("norm", "affine", NOTE, forms, where, told.replace("_", " "))
    elif forms[0] != forms[1]:
        told = f"gain and offset act as {forms[0]} in A and as {forms[1]} in B".replace("_", " ")
        added = _FORMS.get(forms[0], 0.0), _FORMS.get(forms[1], 0.0)
        if added[0] != added[1] and _distance(gains[0][0] - added[0], gains[1][0] - added[1]) <= limit:
            told += ": the stored weight is the same, and one of them adds 1 to it"
        yield difference("norm", "affine", ERROR, forms, where, told)
    else:
        told = "gain or offset hold other values"
        if distance <= _HALF:
            told += ", as rounding to half precision gives"
        yield difference("norm", "gain", WARNING if distance <= _HALF else ERROR, (None, None), where, told)


def _effective(norm: NormSite, named: Named) -> tuple[Tensor, Tensor] | None:
    """The gain and the offset that act, float64 on the CPU; None where the form says nothing of them."""
    if norm.affine == "other" or norm.kind == "unknown":
        return None
    found = []
    for name, missing in ((norm.weight, 1.0), (norm.bias, 0.0)):
        if name is not None and name not in named:
            return None
        held = torch.full((), missing) if name is None else named[name].detach()
        found.append(held.double().cpu().flatten())
    return found[0] + (_FORMS.get(norm.affine, 0.0) if norm.weight is not None else 0.0), found[1]


def _spacing(norm: NormSite, named: Named | None) -> float:
    """Relative spacing of the numbers that the gain is stored in."""
    held = None if named is None or norm.weight is None else named.get(norm.weight)
    return torch.finfo(torch.float64 if held is None or not held.is_floating_point() else held.dtype).eps


def _distance(a: Tensor, b: Tensor) -> float:
    """max |a − b| / max(|a|, |b|), an element at most a thousand times smaller than the largest; infinite where the
    sizes do not fit or a value is not finite."""
    if a.numel() != b.numel() and 1 not in (a.numel(), b.numel()):
        return math.inf
    size = torch.maximum(a.abs(), b.abs())
    peak = float(size.amax())
    apart = float(((a - b).abs() / size.clamp_min(_SMALL * peak)).amax()) if peak else 0.0
    return math.inf if math.isnan(apart) else apart
