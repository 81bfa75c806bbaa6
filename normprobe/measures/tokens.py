"""Statistics over the tokens of one large tensor, in one pass and in pieces where it is very large.

Dims: B batch, S tokens of a sample, C features.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from normprobe import stats

PIECE = 16 * 2**20  # elements that are looked at in one go: 64 MB of float32
_SAFE = (1e-15, 1e15)  # norms between these have squares that float32 holds


def as_tokens(x: Tensor, feature_axis: int) -> Tensor:
    """`x` as [B, S, C] without a copy where its layout allows it; B·S runs over all tokens in their order.

    Args:
        x: features on the last axis, or channels first: [B, C, …].
        feature_axis: -1 or 1.
    """
    x = x.detach()
    if feature_axis % x.dim() == x.dim() - 1:
        return x.reshape(1, -1, x.shape[-1])
    return x.flatten(2).mT


def pieces(x_BSC: Tensor) -> Iterator[tuple[int, int, Tensor]]:
    """Sample, first token and rows [s, C] of pieces of at most `PIECE` elements."""
    step = max(1, PIECE // max(1, x_BSC.shape[-1]))
    for b, sample in enumerate(x_BSC):
        for start in range(0, sample.shape[0], step):
            yield b, start, sample[start : start + step]


def token_rms(x_BSC: Tensor) -> Tensor:
    """RMS of every token, [B·S]; as `stats.token_rms`, in one pass where no square overflows or vanishes."""
    return torch.cat([_rms(rows) for _, _, rows in pieces(x_BSC)])


def _rms(rows: Tensor) -> Tensor:
    dtype = rows.dtype if rows.dtype == torch.float64 else torch.float32
    norms: Tensor = torch.linalg.vector_norm(rows, dim=-1, dtype=dtype)
    low, high = (float(v) for v in norms.aminmax())
    if low > _SAFE[0] and high < _SAFE[1]:
        return norms / math.sqrt(rows.shape[-1])
    return stats.token_rms(rows)


def peak(x_BSC: Tensor) -> stats.Peak:
    """The entry of largest magnitude; the first that is NaN counts as the largest."""
    best: stats.Peak | None = None
    for b, start, rows in pieces(x_BSC):
        found = stats.peak(rows)
        if best is None or found.abs_max > best.abs_max or math.isnan(found.abs_max):
            best = found._replace(token=b * x_BSC.shape[1] + start + found.token)
        if math.isnan(best.abs_max):
            break
    if best is None:
        raise ValueError(f"no elements in a tensor of shape {tuple(x_BSC.shape)}")
    return best
