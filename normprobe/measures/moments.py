"""Moments of a residual stream after a write: over all entries, between tokens, and of the first tokens.

Dims: B batch, S tokens of a sample, N = B·S tokens, C features.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
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


class Sums(NamedTuple):
    """Of one state, over its tokens that count.

    Attributes:
        weighted: of each sample Σ x, and Σ x / |x| without the tokens that are 0; [B, 2, C].
        apart: mean and variance of all entries, where the mean leaves so little of their squares that sums in float32
            do not tell; else None.
    """

    weighted: Tensor
    apart: tuple[float, float] | None


def sums(x_BSC: Tensor, norms_N: Tensor, tokens: Tokens, keep: Callable[[str, Tensor], Tensor]) -> Sums:
    """Look at a state whose tokens have these norms; `keep` is that of `Together`."""
    weighted = keep("weighted", _weighted(x_BSC, norms_N, tokens))
    return Sums(weighted, _apart(x_BSC, weighted, norms_N, tokens))


def moments(states: Sequence[Sums], norms_WN: Tensor, tokens: Tokens) -> list[Moments]:
    """The moments of W states that have the same tokens."""
    weighted = torch.stack([one.weighted for one in states])
    batch, width = weighted.shape[1], weighted.shape[3]
    counted = tokens.counted(norms_WN).double()
    entries = counted.shape[-1] * width
    means = weighted[:, :, 0].sum((1, 2), dtype=torch.float64) / entries
    variances = counted.square().sum(-1) / entries - means.square()
    spread = zip(means.tolist(), variances.where(variances.isfinite(), math.nan).tolist(), strict=True)
    directed = weighted[:, :, 1].double().square().sum(-1)
    directions = (tokens.weights * (norms_WN != 0)).view(len(states), batch, -1).sum(-1).double()
    pairs = (directions * (directions - 1)).sum(-1)
    cosines = ((directed - directions).sum(-1) / pairs.where(pairs > 0, math.nan)).tolist()
    firsts, rests = (_medians(norms_WN[:, some] / math.sqrt(width)) for some in (tokens.first, tokens.rest))
    rows = zip(states, spread, zip(cosines, firsts, rests, strict=True), strict=True)
    told = ((one.apart or found, others) for one, found, others in rows)
    return [Moments(mean, math.sqrt(variance), *others) for (mean, variance), others in told]


def _weighted(x_BSC: Tensor, norms_N: Tensor, tokens: Tokens) -> Tensor:
    unit = (tokens.weights / norms_N).nan_to_num_(0.0, 0.0)
    weights = torch.stack((tokens.weights, unit))
    found = weighted_sums(x_BSC, weights)
    if tokens.kept is None or bool(found.isfinite().all()):
        return found
    left_out = (tokens.weights == 0).view(*x_BSC.shape[:2], 1)  # 0 · NaN is NaN
    return weighted_sums(x_BSC.masked_fill(left_out, 0), weights)


def _apart(x_BSC: Tensor, weighted: Tensor, norms_N: Tensor, tokens: Tokens) -> tuple[float, float] | None:
    """Mean and variance of all entries, taken about the mean."""
    counted = tokens.counted(norms_N).double()  # squares of large norms overflow float32
    entries = len(counted) * x_BSC.shape[-1]
    mean, square = float(weighted[:, 0].sum()) / entries, float(counted.dot(counted)) / entries
    if not math.isfinite(square) or not square - mean * mean < _NARROW * square:
        return None
    apart = (stats.widen(rows) - mean for _, _, rows in pieces(x_BSC))
    found = [(rows.sum(-1), stats.norms(rows)) for rows in apart]
    totals, lengths = (tokens.counted(torch.cat(each)).double() for each in zip(*found, strict=True))
    first, second = float(totals.sum()) / entries, float(lengths.dot(lengths)) / entries
    return mean + first, max(0.0, second - first * first)


def _medians(rows: Tensor) -> tuple[float, ...]:
    """NaN where there is none."""
    return stats.medians(rows) if rows.numel() else (math.nan,) * len(rows)
