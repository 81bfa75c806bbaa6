"""Numbers of every token of one large tensor, each in one pass and in pieces where it is very large.

Dims: B batch, S tokens of a sample, N = B·S tokens, C features.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from normprobe import stats

PIECE = 16 * 2**20  # elements that are looked at in one go: 64 MB of float32


def as_tokens(x: Tensor, feature_axis: int) -> Tensor:
    """`x` as [B, S, C] without a copy where its layout allows it; B·S runs over all tokens in their order.

    Args:
        x: features on the last axis, or channels first: [B, C, …].
        feature_axis: -1 or 1.
    """
    x = x.detach()
    if feature_axis % x.dim() == x.dim() - 1:
        return x.reshape(1, -1, x.shape[-1]) if x.dim() < 3 else x.flatten(1, -2)
    return x.flatten(2).mT


def pieces(x_BSC: Tensor) -> Iterator[tuple[int, int, Tensor]]:
    """Sample, first token and rows [s, C] of pieces of at most `PIECE` elements; all samples at once if they fit."""
    if x_BSC.numel() <= PIECE and x_BSC.is_contiguous():
        yield 0, 0, x_BSC.view(-1, x_BSC.shape[-1])
        return
    step = max(1, PIECE // max(1, x_BSC.shape[-1]))
    for b, sample in enumerate(x_BSC):
        for start in range(0, sample.shape[0], step):
            yield b, start, sample[start : start + step]


def norms(x_BSC: Tensor) -> Tensor:
    """L2 norm of every token, [N]; as `stats.norms`."""
    return torch.cat([stats.norms(rows) for _, _, rows in pieces(x_BSC)])


def token_rms(x_BSC: Tensor) -> Tensor:
    """RMS of every token, [N]; as `stats.token_rms`."""
    return norms(x_BSC) / math.sqrt(x_BSC.shape[-1])


def peaks(x_BSC: Tensor) -> Tensor:
    """Largest |x| of every token, [N], in the dtype of `x`; NaN where an entry is."""
    return torch.cat([torch.maximum(rows.amax(-1), -rows.amin(-1)) for _, _, rows in pieces(x_BSC)])


def weighted_sums(x_BSC: Tensor, weights_KN: Tensor) -> Tensor:
    """Σ over the tokens of each sample of weight · x, for K weights a token: [B, K, C], float32 or wider."""
    batch, tokens, width = x_BSC.shape
    weights = weights_KN.view(-1, batch, tokens).transpose(0, 1)
    if x_BSC.numel() <= PIECE:
        wide = stats.widen(x_BSC)
        return weights.to(wide.dtype) @ wide
    step = max(1, PIECE // max(1, width * batch))
    total = weights.new_zeros(batch, weights.shape[1], width)
    for start in range(0, tokens, step):
        part = stats.widen(x_BSC[:, start : start + step])
        total += weights[..., start : start + step].to(part.dtype) @ part
    return total


def row(x_BSC: Tensor, token: int) -> Tensor:
    """The features [C] of the token with this flat index."""
    return x_BSC[token // x_BSC.shape[1], token % x_BSC.shape[1]]


def rows_at(x_BSC: Tensor, tokens: Tensor) -> Tensor:
    """The features [R, C] of tokens given by their flat indices."""
    if x_BSC.shape[0] == 1:
        return x_BSC[0].index_select(0, tokens)
    return x_BSC[tokens // x_BSC.shape[1], tokens % x_BSC.shape[1]]
