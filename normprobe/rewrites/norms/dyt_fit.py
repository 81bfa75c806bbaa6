"""The Dynamic Tanh that is nearest to what a norm does with what comes to it.

Dims: N rows (tokens), d features.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

_SPAN, _STEPS = 1e3, 129  # alpha is tried from 1/_SPAN to _SPAN over the RMS of the inputs, in equal ratios
_REFINED = 40  # halvings between the neighbours of the best of these
_GOLDEN = (math.sqrt(5) - 1) / 2
SLACK = 0.01  # choice: of what is to be explained, given up for a tanh that bends
SHIFT_ROWS = 16  # choice: fewer rows say too little about a shift for each feature


class Nearest(NamedTuple):
    """`scale · gain · tanh(alpha · x) + shift`, and the share of the norm's outputs that it leaves unexplained."""

    alpha: float
    scale: float
    shift: Tensor
    unexplained: float


def nearest(x: Tensor, y: Tensor, gain: Tensor) -> Nearest:
    """Least squares over alpha, scale, and a shift for each feature.

    The shift makes up for what is the same in every row: the mean, which a LayerNorm subtracts and a tanh does not, and
    features that are always far out, for which alone the tanh would have to be straight. Where the rows are of one size
    the norm is a straight line, for which no alpha is too small: least squares alone would end at a tanh that bounds
    nothing and a gain of 1 / alpha. So alpha is the largest up to 1 / RMS of the inputs, where those of trained DyT
    networks lie (Zhu et al. 2025, sec. 6), that leaves at most `SLACK` more of the outputs unexplained than the best,
    or the best itself where that is larger.

    Args:
        x: (N, d), inputs, float64.
        y: (N, d), outputs times the gain, without the norm's own offset.
        gain: (d,) or (1,), as it acts.

    Returns:
        The shift is 0 with fewer than `SHIFT_ROWS` rows. NaN throughout where a value is not finite, all x are 0, or y
        is the same in every row (with few rows: 0).
    """
    centred = len(x) >= SHIFT_ROWS
    about = y - y.mean(0) if centred else y
    rms, total = float(x.square().mean().sqrt()), float(about.square().sum())
    if not (math.isfinite(rms) and math.isfinite(total) and rms and total):
        return Nearest(math.nan, math.nan, torch.full_like(x[0], math.nan), math.nan)

    def explained(log_alpha: float) -> float:
        t = _bent(x, gain, math.exp(log_alpha), centred)
        size = float(t.square().sum())
        return float((t * about).sum()) ** 2 / size / total if size else 0.0

    alpha = math.exp(_chosen(explained, rms))
    t = _bent(x, gain, alpha, centred)
    scale = float((t * about).sum() / t.square().sum())
    shift = (y - scale * gain * torch.tanh(alpha * x)).mean(0) if centred else torch.zeros_like(x[0])
    return Nearest(alpha, scale, shift, 1 - explained(math.log(alpha)))


def _bent(x: Tensor, gain: Tensor, alpha: float, centred: bool) -> Tensor:
    t = gain * torch.tanh(alpha * x)
    return t - t.mean(0) if centred else t


def _chosen(explained: Callable[[float], float], rms: float) -> float:
    """The logarithm of the alpha that is taken; those that are tried have log(1 / rms) among them."""
    step = 2 * math.log(_SPAN) / (_STEPS - 1)
    tried = [math.log(1 / rms) + (i - _STEPS // 2) * step for i in range(_STEPS)]
    shares = [explained(each) for each in tried]
    at = tried[max(range(_STEPS), key=shares.__getitem__)]
    left, right = at - step, at + step
    for _ in range(_REFINED):
        a, b = right - _GOLDEN * (right - left), left + _GOLDEN * (right - left)
        left, right = (a, right) if explained(a) < explained(b) else (left, b)
    best = (left + right) / 2
    enough, middle = explained(best) - SLACK, _STEPS // 2 + 1
    pairs = zip(tried[:middle], shares[:middle], strict=True)
    return max([best, *(alpha for alpha, share in pairs if share >= enough)])
