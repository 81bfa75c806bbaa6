"""Moments of a residual stream after a write: over all entries, between tokens, and of the first tokens.

Dims: B batch, S tokens of a sample, N = B·S tokens, C features.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from normprobe import stats
from normprobe.measures.tokens import pieces, weighted_sums
from normprobe.measures.trunk import Tokens

_NARROW = 1e-3  # a variance that much smaller than the mean square is not told by sums in float32 to 1e-3


class Moments(NamedTuple):
    """Of the stream after a write.

    Attributes:
        mean, std: over all entries.
        token_cosine: mean cosine between two different tokens of one sample; NaN with one token.
        first_rms, other_rms: median token RMS of the first tokens of the samples, and of all others.
    """

    mean: float
    std: float
    token_cosine: float
    first_rms: float
    other_rms: float


def moments(x_BSC: Tensor, norms_N: Tensor, tokens: Tokens) -> Callable[[], Moments]:
    """Look at a state with these norms; the call that is returned takes the rest from small tensors."""
    sums = _sums(x_BSC, norms_N, tokens)
    return partial(_moments, sums, norms_N, tokens, *_spread(x_BSC, sums, norms_N, tokens))


def _sums(x_BSC: Tensor, norms_N: Tensor, tokens: Tokens) -> Tensor:
    """Over the tokens of each sample that count: Σ x, and Σ x / |x| without the tokens that are 0; [B, 2, C]."""
    unit = (tokens.weights / norms_N).where(tokens.weights * norms_N > 0, 0.0)
    weights = torch.stack((tokens.weights, unit))
    sums = weighted_sums(x_BSC, weights)
    if tokens.kept is None or bool(sums.isfinite().all()):
        return sums
    left_out = (tokens.weights == 0).view(*x_BSC.shape[:2], 1)  # 0 · NaN is NaN
    return weighted_sums(x_BSC.masked_fill(left_out, 0), weights)


def _spread(x_BSC: Tensor, sums: Tensor, norms_N: Tensor, tokens: Tokens) -> tuple[float, float]:
    """Mean and variance of all entries; where the mean leaves little of their squares they are taken about it anew."""
    counted = tokens.counted(norms_N).double()
    entries = len(counted) * x_BSC.shape[-1]
    mean, square = float(sums[:, 0].sum(dtype=torch.float64)) / entries, float(counted.dot(counted)) / entries
    if not math.isfinite(square):
        return mean, math.nan
    if not square - mean * mean < _NARROW * square:
        return mean, square - mean * mean
    apart = (stats.widen(rows) - mean for _, _, rows in pieces(x_BSC))
    found = [(rows.sum(-1), stats.norms(rows)) for rows in apart]
    totals, lengths = (tokens.counted(torch.cat(each)).double() for each in zip(*found, strict=True))
    first, second = float(totals.sum()) / entries, float(lengths.dot(lengths)) / entries
    return mean + first, max(0.0, second - first * first)


def _moments(sums: Tensor, norms_N: Tensor, tokens: Tokens, mean: float, variance: float) -> Moments:
    batch, _, width = sums.shape
    directed = sums[:, 1].double()
    directions = (tokens.weights * (norms_N != 0)).view(batch, -1).sum(-1).double()
    pairs = float((directions * (directions - 1)).sum())
    root = math.sqrt(width)
    return Moments(
        mean,
        std=math.sqrt(variance),
        token_cosine=float((directed.square().sum(-1) - directions).sum()) / pairs if pairs else math.nan,
        first_rms=_median(norms_N[tokens.first]) / root,
        other_rms=_median(norms_N[tokens.rest]) / root,
    )


def _median(values: Tensor) -> float:
    """NaN where there is none."""
    return stats.medians(values[None])[0] if values.numel() else math.nan
