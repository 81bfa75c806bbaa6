"""Attention logits of sampled query rows, and a bound on those of all rows.

Dims: B batch, H query heads, K key heads, Q query rows, R sampled query rows, T keys, D head width.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from normprobe import stats

SATURATED = 0.99  # a row whose largest probability is above this
MASKED = -1e4  # an additive mask this low leaves a probability of exactly 0 in float32
_NEVER = -1e30  # in the place of masked logits: a probability of exactly 0, and 0 · _NEVER is 0


class LogitStats(NamedTuple):
    """Statistics of attention logits, one number a query head; fields as in `records.HeadLogits`."""

    max: tuple[float, ...]
    uncapped_max: tuple[float, ...]
    std: tuple[float, ...]
    entropy: tuple[float, ...]
    saturated: tuple[float, ...]
    first_token: tuple[float, ...]


def sampled_logit_stats(
    q: Tensor, k: Tensor, scale: float | Tensor, *, mask: Tensor | None = None, softcap: float | None = None
) -> LogitStats:
    """Statistics of the logits (scale, softcap, mask) and probabilities of R sampled rows, in R·T memory a head.

    Args:
        q: [B, H, R, D], any real dtype.
        k: [B, K, T, D] with H a multiple of K.
        scale: factor on q·kᵀ, a number or broadcastable to [B, H, R, 1].
        mask: broadcastable to [B, H, R, T]; boolean (True: attend), or additive (its finite part is a bias;
            entries at or below `MASKED` count as masked).
        softcap: c of c·tanh(logit / c), or None.

    Returns:
        One number a head, over all samples and rows. Rows without a key are left out; rows with one key are
        left out of entropy and saturation. NaN where nothing is left, and wherever a head has a NaN.

    Raises:
        ValueError: if the shapes do not fit.
    """
    logits = _products(q, k, scale)
    broken = logits.amax((0, 2, 3)).isnan()  # a NaN is never masked away
    blocked, bias = _blocked(mask, logits)
    uncapped = None
    if softcap is not None:
        uncapped = _largest(logits if bias is None else logits + bias, blocked)
        logits = logits.div_(softcap).tanh_().mul_(softcap)
    if bias is not None:
        logits.add_(bias)
    top = _largest(logits, blocked)
    rows = top, top if uncapped is None else uncapped, *_statistics(logits, blocked)
    return LogitStats(*(tuple(row.masked_fill(broken, math.nan).tolist()) for row in rows))


def _products(q: Tensor, k: Tensor, scale: float | Tensor) -> Tensor:
    """Scaled q·kᵀ, [B, H, R, T] in memory of its own; heads that share a key are multiplied together."""
    batch, heads, rows, width = q.shape
    key_heads, keys = k.shape[1], k.shape[2]
    if k.shape[0] != batch or k.shape[3] != width or heads % key_heads:
        raise ValueError(f"q [B, H, R, D] and k [B, K, T, D] do not fit: {[*q.shape]} and {[*k.shape]}")
    scaled = stats.widen(q.detach()) * scale
    grouped = scaled.reshape(batch, key_heads, heads // key_heads * rows, width)
    return (grouped @ stats.widen(k.detach()).mT).reshape(batch, heads, rows, keys)


def _blocked(mask: Tensor | None, logits: Tensor) -> tuple[Tensor | None, Tensor | None]:
    """Which logits are masked, and what is added to the others."""
    if mask is None:
        return None, None
    if mask.dtype is torch.bool:
        return ~mask, None
    blocked = mask <= MASKED
    bias = mask.to(logits.dtype).masked_fill(blocked, 0.0)
    return blocked, bias if bool(bias.any()) else None


def _largest(logits: Tensor, blocked: Tensor | None) -> Tensor:
    """The largest of each head that is not masked; NaN where all are. Masked ones are overwritten."""
    if blocked is not None:
        logits.masked_fill_(blocked, _NEVER)
    top = logits.amax((0, 2, 3))
    return top.masked_fill(top <= _NEVER, math.nan)


def _statistics(logits: Tensor, blocked: Tensor | None) -> tuple[Tensor, ...]:
    """Standard deviation, entropy, saturation and mass on the first key, a head; uses up `logits`."""
    keys = logits.shape[-1]
    seen = logits.new_full((1, 1, 1), keys)
    if blocked is not None:
        seen = keys - blocked.expand(*blocked.shape[:-1], keys).sum(-1).to(logits.dtype)
        logits.masked_fill_(blocked, 0.0)
    seen = seen.expand(logits.shape[:-1])
    count = _total(seen)
    logits.sub_((_total(logits.sum(-1)) / count)[:, None, None])
    if blocked is not None:
        logits.masked_fill_(blocked, 0.0)
    std = (_total(torch.linalg.vector_norm(logits, dim=-1).square()) / count).sqrt()
    if blocked is not None:
        logits.masked_fill_(blocked, _NEVER)
    logits.sub_(logits.amax(-1, keepdim=True))
    probability = torch.softmax(logits, -1)
    likeliest, first = probability.amax(-1), probability[..., 0].clone()
    entropy = -likeliest.log() - probability.mul_(logits).sum(-1)
    some, several = seen > 0, seen > 1
    return (
        std,
        _mean(entropy / seen.clamp(min=2).log(), several),
        _mean((likeliest > SATURATED).to(entropy.dtype), several),
        _mean(first, some),
    )


def _total(rows_BHR: Tensor) -> Tensor:
    """Sum over samples and rows, a head; float64, so that many rows lose nothing."""
    return rows_BHR.double().sum((0, 2)).to(rows_BHR.dtype)


def _mean(rows_BHR: Tensor, chosen: Tensor) -> Tensor:
    """Mean over the chosen rows, a head; NaN where there is none."""
    return rows_BHR.masked_fill(~chosen, 0.0).sum((0, 2)) / chosen.sum((0, 2))


class Lengths(NamedTuple):
    """L2 norms of all queries and keys, a query head: the largest, and the RMS of their entries."""

    bound: tuple[float, ...]
    q_rms: tuple[float, ...]
    k_rms: tuple[float, ...]


def lengths(q: Tensor, k: Tensor, scale: float | Tensor) -> Lengths:
    """max|q| · max|k| · |scale| per query head, by Cauchy-Schwarz a bound on |logit| before softcap; RMS of q and k.

    Args:
        q: [B, H, Q, D], all query rows, any real dtype.
        k: [B, K, T, D] with H a multiple of K.
        scale: a number, or a tensor with one factor a head (any shape that holds H or one element).

    Returns:
        One number a query head; NaN where a row of the head has one.

    Raises:
        ValueError: if H is not a multiple of K.
    """
    heads, key_heads = q.shape[1], k.shape[1]
    if heads % key_heads:
        raise ValueError(f"{heads} query heads do not share {key_heads} key heads evenly")
    queries, keys = stats.norms(q), stats.norms(k).repeat_interleave(heads // key_heads, 1)
    longest = queries.amax((0, 2)) * keys.amax((0, 2))
    factor = scale.detach().abs().flatten().to(longest) if isinstance(scale, Tensor) else abs(scale)
    rms = ((each.double().square().mean((0, 2)) / q.shape[-1]).sqrt() for each in (queries, keys))
    return Lengths(tuple((longest * factor).tolist()), *(tuple(each.tolist()) for each in rms))
