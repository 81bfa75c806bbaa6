"""99 % intervals of means over rows that are a sample of all: half widths before sampling from finitely many.

Dims: N statistics, B batch, H heads, R sampled rows.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

_WIDE = 2.576  # the 99.5 % quantile of a normal variable: 99 % lie within as many standard errors
_TINY = 1e-300  # in float64 no variance of logits or entropies but 0 is below


def of_mean(apart_NBHR: Tensor, chosen: Tensor) -> Tensor:
    """Half width of the interval of a mean over rows, by the spread that they show.

    t · s/√n · (1 + z·√((κ − 1) / 4n)): Student's quantile of n − 1 degrees times the standard error, which is itself
    taken at the upper end of its own interval, as s² varies by s⁴·(κ − 1)/n for rows of kurtosis κ.

    Args:
        apart_NBHR: how far rows are from the mean of the chosen ones, float64.
        chosen: which rows count, boolean, of the same shape.

    Returns:
        [N, H], float64, in the unit of `apart_NBHR`; NaN where fewer than three rows are chosen.

    Source: Cochran 1977, sec. 2.8 and 2.15; the variance of s²: Cramér 1946, sec. 27.4.
    """
    number = chosen.sum((1, 3)).double()
    squares = apart_NBHR.masked_fill(~chosen, 0.0).square()
    spread = squares.sum((1, 3)) / number
    fourth = squares.square().sum((1, 3)) / number / spread.clamp(min=_TINY)
    own = ((fourth - spread).clamp(min=0) / (4 * number)).sqrt()
    half = _student(number - 1) * (spread.sqrt() + _WIDE * own) / (number - 1).sqrt()
    return half.where(number > 2, math.nan)


def _student(degrees: Tensor) -> Tensor:
    """The 99.5 % quantile of Student's t, at most 7 % too large for 2 degrees, 1 % for 5 (Peizer & Pratt 1968)."""
    shrunk = (degrees - 5 / 6) / (degrees - 2 / 3 + 0.1 / degrees).square()
    return (degrees * torch.expm1(_WIDE**2 * shrunk)).sqrt()


def of_share(mean_NH: Tensor, chosen: Tensor) -> Tensor:
    """Half width of the interval of a mean of numbers in [0, 1], by the largest spread that numbers of this mean can
    have, with two of either end added (Agresti & Coull 1998).

    Args:
        mean_NH: the means over the chosen rows.
        chosen: which rows count, boolean [N, B, H, R].

    Returns:
        [N, H].
    """
    number = chosen.sum((1, 3)) + 4.0
    mean = (mean_NH * (number - 4) + 2) / number
    return _WIDE * (mean * (1 - mean) / number).sqrt()
