"""How far outputs lie apart, and how much of them is NaN or infinite."""

from __future__ import annotations

from collections.abc import Iterator
from math import isfinite, isnan, nan
from typing import Any

import torch
from torch import Tensor

from normprobe.rewrites.edits import parts_of


def distance(a: list[Tensor], b: list[Tensor]) -> float:
    """max |a − b| over all elements; infinite where NaN or infinity meets anything but itself, which is no change; NaN
    where all are NaN, or infinite, in both alike."""
    most = nan
    for part, beside in _pairs(a, b):
        found = float((part - beside).abs().amax())
        if not isfinite(found):
            alike = (part == beside) | (part.isnan() & beside.isnan())
            if not (part.isfinite() | ~alike).any():
                continue
            found = float((part - beside).abs().nan_to_num(torch.inf, torch.inf).masked_fill(alike, 0.0).amax())
        most = found if isnan(most) else max(most, found)
    return most


def largest(outputs: list[Tensor]) -> float:
    """max |a| over all elements that are finite; 0 without any."""
    each = (part.double().abs().nan_to_num(0.0, posinf=0.0) for tensor in outputs for part in parts_of(tensor))
    return max((float(part.amax()) for part in each), default=0.0)


def not_finite(before: list[Tensor], after: list[Tensor]) -> dict[str, int]:
    """How many values there are, and how many of them are NaN or infinite, as fields of a `Proof`."""
    values = old = now = new = 0
    for part, beside in _pairs(before, after):
        was, is_now = ~part.isfinite(), ~beside.isfinite()
        values, old, now = values + part.numel(), old + int(was.sum()), now + int(is_now.sum())
        new += int((is_now & ~was).sum())
    return {"values": values, "not_finite_before": old, "not_finite_after": now, "not_finite_new": new}


def unproven(broken: dict[str, int], change: float, exact: bool) -> dict[str, Any]:
    """Why there is no tolerance, as fields of a `Proof`; empty where all outputs of an exact rewrite are finite."""
    if isnan(change):
        why = f"all {broken['values']:,} values are NaN or infinite, before and after alike; other inputs may tell more"
        return {"tolerance_source": why}
    if exact and broken["not_finite_new"]:
        why = f"{broken['not_finite_new']:,} values are NaN or infinite that are finite in the original"
        return {"tolerance_source": why, "holds": False}
    if exact and broken["not_finite_before"]:
        why = (
            "the original's outputs are not finite on these inputs, and only inputs on which all are can prove it exact"
        )
        return {"tolerance_source": why}
    return {}


def _pairs(a: list[Tensor], b: list[Tensor]) -> Iterator[tuple[Tensor, Tensor]]:
    """Parts of both that lie on each other, in float64."""
    for one, other in zip(a, b, strict=True):
        for part, beside in zip(parts_of(one), parts_of(other), strict=True):
            yield part.double(), beside.double()
