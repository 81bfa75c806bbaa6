"""Curves of single elements: the nearest tanh and line by least squares, and means over groups."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

_COARSE, _STEPS = 65, 60  # values of alpha that are tried first, and halvings after that
_SPAN = 1e3  # alpha is looked for from 1/_SPAN to _SPAN over the RMS of the inputs
_GOLDEN = (math.sqrt(5) - 1) / 2


class Bend(NamedTuple):
    """The nearest `scale · tanh(alpha · x)`, and the share of Σz² that it and the nearest line explain."""

    alpha: float
    scale: float
    tanh_fit: float
    linear_fit: float


def bend(x: Tensor, z: Tensor) -> Bend:
    """Least squares over scale and alpha > 0; NaN where a value is not finite or all x or all z are 0.

    For a given alpha the best scale is Σ z·t / Σ t², t = tanh(alpha · x). The best alpha is the best of a
    logarithmic grid, refined by golden-section search between its neighbours.

    Args:
        x, z: elements, flat, float64.
    """
    rms, total = float(x.square().mean().sqrt()), float(z.square().sum())
    if not math.isfinite(rms) or not math.isfinite(total) or rms == 0 or total == 0:
        return Bend(math.nan, math.nan, math.nan, math.nan)

    def explained(log_alpha: float) -> float:
        return _explained(torch.tanh(math.exp(log_alpha) * x), z) / total

    low, high = -math.log(_SPAN * rms), math.log(_SPAN / rms)
    width = (high - low) / (_COARSE - 1)
    best = max((low + i * width for i in range(_COARSE)), key=explained)
    left, right = best - width, best + width
    for _ in range(_STEPS):
        a, b = right - _GOLDEN * (right - left), left + _GOLDEN * (right - left)
        left, right = (a, right) if explained(a) < explained(b) else (left, b)
    alpha = math.exp((left + right) / 2)
    t = torch.tanh(alpha * x)
    return Bend(alpha, float((z * t).sum() / t.square().sum()), _explained(t, z) / total, _explained(x, z) / total)


def _explained(t: Tensor, z: Tensor) -> float:
    """Σz² less what is left of it beside the nearest multiple of t."""
    size = float(t.square().sum())
    return float((z * t).sum()) ** 2 / size if size else 0.0


def grouped(x: Tensor, z: Tensor, groups: int) -> list[tuple[float, float]]:
    """Means of x and z over `groups` groups of equal size (fewer where there are fewer elements), by rising x."""
    order = x.argsort()
    return [
        (float(x[part].mean()), float(z[part].mean()))
        for part in order.tensor_split(min(groups, len(order)))
        if len(part)
    ]
