"""Attention logits of sampled query rows, and a bound on those of all rows.

Dims: B batch, H query heads, K key heads, Q query rows, R sampled query rows, T keys, D head width.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from normprobe import stats
from normprobe.measures.intervals import of_mean, of_share
from normprobe.measures.scratch import Scratch

SATURATED = 0.99  # a row whose largest probability is above this
_NEVER = -1e30  # added to masked logits: float32 drops what they were, a probability of exactly 0, and 0 · _NEVER is 0
_HUGE = 80.0  # e^80 times all that is weighed beside it: float32 holds it, and what is beside it has no share
_LOG2_E = 1 / math.log(2)


class LogitStats(NamedTuple):
    """Statistics of attention logits, one number a query head; fields as in `records.HeadLogits` and its margins."""

    max: tuple[float, ...]
    uncapped_max: tuple[float, ...]
    std: tuple[float, ...]
    entropy: tuple[float, ...]
    saturated: tuple[float, ...]
    first_token: tuple[float, ...]
    sink: tuple[float, ...]
    std_margin: tuple[float, ...]
    entropy_margin: tuple[float, ...]
    saturated_margin: tuple[float, ...]
    first_token_margin: tuple[float, ...]
    sink_margin: tuple[float, ...]


class Mask(NamedTuple):
    """A mask as the logits of some rows need it; each broadcasts to [B, H, R, T].

    Attributes:
        hidden: `_NEVER` where a logit is masked, else 0; to be added.
        open: 0 where a logit is masked, else 1.
        seen: how many keys are not masked, [B, H, R].
        bias: what the mask itself adds to the others; None: nothing.
    """

    hidden: Tensor
    open: Tensor
    seen: Tensor
    bias: Tensor | None

    @classmethod
    def of(cls, mask: Tensor, dtype: torch.dtype, keys: int) -> Mask:
        """From a boolean mask (True: attend) or an additive one (-inf: masked)."""
        shown = mask if mask.dtype is torch.bool else mask != -torch.inf
        hidden = torch.zeros((), dtype=dtype, device=mask.device).where(shown, _NEVER)
        bias = None
        if mask.dtype is not torch.bool:
            bias = mask.to(dtype).where(shown, 0.0)
            bias = bias if bool(bias.any()) else None
        opened = shown.to(dtype)
        return cls(hidden, opened, opened.expand(*opened.shape[:-1], keys).sum(-1), bias)


class RowStats(NamedTuple):
    """What some rows show, each [B, H, R]; with y = logit - largest of its row.

    Attributes:
        top, uncapped: the largest logit, with and without softcap and bias; `_NEVER` or less where all are masked.
        total, first: Σ e^y and e^y of the first key.
        sunk: Σ e^y over the logits of no key; 0 where there are none.
        entropy: of the probabilities of keys among themselves, in nats.
        seen: how many keys are not masked.
        sums, squares: Σ y and Σ y² over these.
    """

    top: Tensor
    uncapped: Tensor
    total: Tensor
    first: Tensor
    sunk: Tensor
    entropy: Tensor
    seen: Tensor
    sums: Tensor
    squares: Tensor


def row_stats(
    q: Tensor,
    k: Tensor,
    scale: float | Tensor,
    mask: Tensor | None = None,
    softcap: float | None = None,
    *,
    first_B: Tensor | None = None,
    sinks: Tensor | None = None,
    scratch: Scratch | None = None,
    products: bool = True,
) -> RowStats:
    """Look at the logits (scale, softcap, mask) and probabilities of R rows, in R·T memory a head.

    Args:
        q: [B, H, R, D], any real dtype.
        k: [B, K, T, D] with H a multiple of K.
        scale: factor on q·kᵀ, a number or broadcastable to [B, H, R, 1].
        mask: broadcastable to [B, H, R, T]; boolean (True: attend), or additive (-inf: masked; all
            others are a bias).
        softcap: c of c·tanh(logit / c), or None.
        first_B: the first key of each sample; None: 0.
        sinks: logits [B, H, R, S] of no key, which take a share of each row's probability.
        scratch: memory to use again for the next rows.
        products: whether q·kᵀ are the products, which `uncapped` is about; else it is `top`.

    Raises:
        ValueError: if the shapes do not fit.
    """
    scratch = scratch or Scratch()
    logits, seen = _products(q, k, scale, scratch), None
    if mask is not None:
        seen = scratch.made("mask", (mask, logits.dtype, k.shape[2]), lambda: Mask.of(mask, logits.dtype, k.shape[2]))
    uncapped, bias = None, None if seen is None else seen.bias
    if products and (softcap is not None or bias is not None):
        uncapped = _tops(logits, seen)
    if softcap is not None:
        logits = logits.div_(softcap).tanh_().mul_(softcap)
    if bias is not None:
        logits.add_(bias)
    tops = _tops(logits, seen)
    weights = scratch.take("weights", logits.shape, logits)
    return _rows(logits, weights, tops, tops if uncapped is None else uncapped, seen, first_B, sinks)


def tops_seen(logits: Tensor, mask: Tensor) -> Tensor:
    """The largest logit of each row, [B, H, R], where the mask hides nothing; overwrites `logits`."""
    return _tops(logits, Mask.of(mask, logits.dtype, logits.shape[-1]))[..., 0]


def largest_seen(logits: Tensor, mask: Tensor) -> tuple[float, ...]:
    """The largest logit [B, H, R, T] of each head where the mask hides nothing; NaN where all are hidden."""
    return tuple(_largest(tops_seen(logits, mask)).tolist())


def largest_of(rows: RowStats) -> tuple[float, ...]:
    """The largest logit of each head in some rows; NaN where all are masked."""
    return tuple(_largest(rows.top).tolist())


def joined(parts: Sequence[RowStats], axis: int) -> RowStats:
    """More rows of the same heads (axis -1), or other heads (axis 1)."""
    return parts[0] if len(parts) == 1 else RowStats(*(torch.cat(each, axis) for each in zip(*parts, strict=True)))


def logit_stats(rows: RowStats, share: float = 1.0) -> LogitStats:
    """Statistics over all samples and rows, which are this share of all rows.

    Returns:
        One number a head. Rows without a key are left out; rows with one key are left out of entropy and saturation.
        NaN where nothing is left, and wherever a head has a NaN, masked or not. Margins are those of
        `records.Margins`, 0 where `share` is 1.
    """
    some, several = rows.seen > 0, rows.seen > 1
    entropy = rows.entropy / rows.seen.clamp(min=2).log()
    whole = rows.total + rows.sunk
    saturated = (whole < 1 / SATURATED).where(~whole.isnan(), math.nan)
    means = [_mean(entropy, several), _mean(saturated, several)]
    means += [_mean(rows.first / whole, some), _mean(rows.sunk / whole, some)]
    deviation, apart = _deviation(rows)
    apart = torch.stack([apart, entropy - means[0][:, None]])
    halves = [*of_mean(apart, torch.stack([some, several]))]
    halves += of_share(torch.stack(means[1:]), torch.stack([several, some, some]))
    left = math.sqrt(1 - share)
    margins = [each * left if left else torch.zeros_like(each) for each in halves]
    found = _largest(rows.top), _largest(rows.uncapped), deviation, *means, *margins
    return LogitStats(*(tuple(each.tolist()) for each in found))


def _products(q: Tensor, k: Tensor, scale: float | Tensor, scratch: Scratch) -> Tensor:
    """Scaled q·kᵀ, [B, H, R, T] in scratch memory; heads that share a key are multiplied together."""
    batch, heads, rows, width = q.shape
    key_heads, keys = k.shape[1], k.shape[2]
    if k.shape[0] != batch or k.shape[3] != width or heads % key_heads:
        raise ValueError(f"q [B, H, R, D] and k [B, K, T, D] do not fit: {[*q.shape]} and {[*k.shape]}")
    scaled = stats.widen(q.detach()) * scale
    grouped = scaled.reshape(batch, key_heads, heads // key_heads * rows, width)
    products = scratch.take("logits", (*grouped.shape[:3], keys), grouped)
    return torch.matmul(grouped, stats.widen(k.detach()).mT, out=products).view(batch, heads, rows, keys)


def _tops(logits: Tensor, mask: Mask | None) -> Tensor:
    """The largest logit of each row, [B, H, R, 1], `_NEVER` or less where all are masked; hides them in `logits`.

    A sum costs a seventh of a fill and does not hide a NaN; an infinite logit needs the fill.
    """
    if mask is None:
        return logits.amax(-1, keepdim=True)
    tops = logits.add_(mask.hidden).amax(-1, keepdim=True)
    if bool((tops == torch.inf).any()):
        tops = logits.masked_fill_(mask.hidden < 0, _NEVER).amax(-1, keepdim=True)
    return tops


def _rows(
    logits: Tensor,
    weights: Tensor,
    tops: Tensor,
    uncapped: Tensor,
    mask: Mask | None,
    first_B: Tensor | None,
    sinks: Tensor | None,
) -> RowStats:
    """Uses up `logits`, of which the masked ones are hidden already, and overwrites `weights`."""
    below = logits.sub_(tops)
    torch.mul(below, _LOG2_E, out=weights).exp2_()  # in a fifth of the time of exp
    total, first = weights.sum(-1), _first(weights, first_B)
    sunk = torch.zeros_like(total) if sinks is None else (sinks - tops).clamp(max=_HUGE).exp().sum(-1)
    entropy = total.log() - weights.mul_(below).sum(-1) / total
    if mask is None:
        seen = logits.new_full((1, 1, 1), logits.shape[-1])
    else:
        seen = mask.seen
        below.mul_(mask.open)
    squares = torch.linalg.vector_norm(below, dim=-1).square()
    seen = seen.expand(total.shape)
    return RowStats(tops[..., 0], uncapped[..., 0], total, first, sunk, entropy, seen, below.sum(-1), squares)


def _first(weights: Tensor, first_B: Tensor | None) -> Tensor:
    """The weights of the first keys, [B, H, R]."""
    if first_B is None:
        return weights[..., 0].clone()
    return weights.gather(-1, first_B.view(-1, 1, 1, 1).expand(*weights.shape[:-1], 1))[..., 0]


def _largest(tops: Tensor) -> Tensor:
    """The largest of each head; NaN where all are masked."""
    top = tops.amax((0, 2))
    return top.masked_fill(top <= _NEVER / 2, math.nan)


def _deviation(rows: RowStats) -> tuple[Tensor, Tensor]:
    """Standard deviation of all logits of a head, `seen` in a row, whose sums and squares are below `top`, [H]; and how
    far rows are apart in what they add to it, [B, H, R]: their mean of 0 errs as much as the deviation."""
    tops, sums, squares, seen = (each.double() for each in (rows.top, rows.sums, rows.squares, rows.seen))
    count = seen.sum((0, 2))
    shift = tops - ((sums + seen * tops).sum((0, 2)) / count)[:, None]
    squares = squares + 2 * shift * sums + seen * shift.square()
    variance = (squares.sum((0, 2)) / count).clamp(min=0)
    deviation, number = variance.sqrt(), (seen > 0).sum((0, 2))
    rate = number / count / (2 * deviation).where(deviation > 0, 1.0)
    return deviation, (squares - variance[:, None] * seen) * rate[:, None]


def _mean(rows_BHR: Tensor, chosen: Tensor) -> Tensor:
    """Mean over the chosen rows, a head; NaN where there is none."""
    return rows_BHR.masked_fill(~chosen, 0.0).sum((0, 2)) / chosen.sum((0, 2))
