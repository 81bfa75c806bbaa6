"""Tensors to numbers: pure functions, float32 or wider inside, NaN in is NaN out.

Dims: B batch, H query heads, K key heads, R sampled query rows, T keys, D head width, L writes to a stream.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from normprobe.records import Growth

SATURATED = 0.99  # a row whose largest probability is above this
MASKED = -1e4  # an additive mask this low leaves a probability of exactly 0 in float32


def widen(x: Tensor) -> Tensor:
    """`x` in float32, or as it is where it is float64; integers and half precision are converted."""
    return x if x.dtype in (torch.float32, torch.float64) else x.float()


def token_rms(x: Tensor, feature_axis: int = -1) -> Tensor:
    """Root mean square over the features of every token.

    Scaled by each token's peak first, so that squares neither overflow nor vanish.

    Args:
        x: any shape, any real dtype.
        feature_axis: the axis of the features.

    Returns:
        The shape of `x` without `feature_axis`, float32 (float64 for float64 input), in the unit of `x`. NaN
        where a feature is NaN, infinite where one is infinite.
    """
    wide = widen(x.detach())
    peak = wide.abs().amax(feature_axis, keepdim=True)
    scale = peak.where(torch.isfinite(peak) & (peak > 0), 1.0)
    return (wide / scale).square().mean(feature_axis).sqrt() * scale.squeeze(feature_axis)


def quantiles(values: Tensor, levels: Sequence[float]) -> tuple[float, ...]:
    """Quantiles of all elements of `values`, linearly interpolated between order statistics.

    Args:
        values: any shape with at least one element, any real dtype.
        levels: levels in [0, 1].

    Returns:
        One number a level; NaN throughout where any element is NaN.

    Raises:
        ValueError: if `values` is empty or a level lies outside [0, 1].
    """
    if values.numel() == 0 or not all(0 <= level <= 1 for level in levels):
        raise ValueError(f"quantiles need an element and levels in [0, 1], found {values.numel()}, {levels}")
    ordered = widen(values.detach()).flatten().sort().values
    if torch.isnan(ordered[-1]):  # NaN sorts last
        return (math.nan,) * len(levels)
    return tuple(_between(ordered, level * (ordered.numel() - 1)) for level in levels)


def _between(ordered: Tensor, place: float) -> float:
    low = math.floor(place)
    a, b = float(ordered[low]), float(ordered[math.ceil(place)])
    return a if a == b else a + (place - low) * (b - a)


class Summary(NamedTuple):
    """Median, 99th percentile and maximum; `argmax` is the flat index of the largest or of the first NaN."""

    median: float
    p99: float
    max: float
    argmax: int


def summary(rms_tokens: Tensor) -> Summary:
    """Summary of one number a token.

    Args:
        rms_tokens: any shape with at least one element, for example the result of `token_rms`.

    Raises:
        ValueError: if there is no element.
    """
    median, p99, largest = quantiles(rms_tokens, (0.5, 0.99, 1.0))
    return Summary(median, p99, largest, int(widen(rms_tokens).argmax()))


class Peak(NamedTuple):
    """Largest |x|, the entry itself, its channel and the flat index of its token; NaN where any entry is."""

    abs_max: float
    value: float
    channel: int
    token: int


def peak(x: Tensor, feature_axis: int = -1) -> Peak:
    """The entry of largest magnitude.

    Args:
        x: any shape with at least one element, any real dtype.
        feature_axis: the axis of the features; all others are counted as tokens, in their order.

    Raises:
        ValueError: if there is no element.
    """
    if x.numel() == 0:
        raise ValueError(f"peak needs at least one element, found shape {tuple(x.shape)}")
    rows = x.detach().movedim(feature_axis, -1)
    flat = rows.abs().argmax()  # NaN counts as the largest
    value = float(rows[torch.unravel_index(flat, rows.shape)])
    token, channel = divmod(int(flat), rows.shape[-1])
    return Peak(abs(value), value, channel, token)


def growth(values: Sequence[float]) -> Growth:
    """Growth exponent of a residual stream: least squares of log rms on log l, l = 1 … L.

    Args:
        values: token-median RMS after each write, L writes.

    Returns:
        Exponent p of rms ∝ l^p, its 95 % interval (Student's t, L - 2 degrees of freedom) and R² (1 where
        the stream is constant); NaN with fewer than four writes, or a value that is not finite or positive.

    Source: p = 1/2 for independent unit writes (Xiong et al. 2020, lemma 2).
    """
    count, unknown = len(values), math.nan
    if count < 4 or not all(math.isfinite(value) and value > 0 for value in values):
        return Growth(exponent=unknown, interval=(unknown, unknown), r_squared=unknown, writes=count)
    x, y = [math.log(index) for index in range(1, count + 1)], [math.log(value) for value in values]
    x_mean, y_mean = math.fsum(x) / count, math.fsum(y) / count
    spread = math.fsum((a - x_mean) ** 2 for a in x)
    slope = math.fsum((a - x_mean) * (b - y_mean) for a, b in zip(x, y, strict=True)) / spread
    rest = math.fsum((b - y_mean - slope * (a - x_mean)) ** 2 for a, b in zip(x, y, strict=True))
    total = math.fsum((b - y_mean) ** 2 for b in y)
    half = student_t(0.95, count - 2) * math.sqrt(rest / (count - 2) / spread)
    fit = 1.0 if total == 0 else 1.0 - rest / total
    return Growth(exponent=slope, interval=(slope - half, slope + half), r_squared=fit, writes=count)


def student_t(coverage: float, freedom: int) -> float:
    """The t with P(|T| ≤ t) = coverage, by bisection on the exact sum for whole degrees of freedom.

    Args:
        coverage: probability in (0, 1).
        freedom: degrees of freedom, at least 1.

    Raises:
        ValueError: if an argument lies outside its range.

    Source: Abramowitz & Stegun, Handbook of Mathematical Functions, 26.7.3 and 26.7.4.
    """
    if not 0 < coverage < 1 or freedom < 1:
        raise ValueError(f"student_t needs 0 < coverage < 1 and freedom >= 1, found {coverage}, {freedom}")
    low, high = 0.0, math.pi / 2  # in the angle atan(t / √freedom)
    for _ in range(200):
        middle = (low + high) / 2
        low, high = (middle, high) if _within(middle, freedom) < coverage else (low, middle)
    return math.sqrt(freedom) * math.tan(low)


def _within(angle: float, freedom: int) -> float:
    """P(|T| ≤ t) at t = √freedom · tan(angle)."""
    odd = freedom % 2
    term = math.cos(angle) if odd else 1.0
    total = term if freedom > 1 else 0.0
    for k in range(2 if odd else 1, freedom - 2, 2):
        term *= math.cos(angle) ** 2 * k / (k + 1)
        total += term
    return 2 / math.pi * (angle + math.sin(angle) * total) if odd else math.sin(angle) * total


class LogitStats(NamedTuple):
    """Statistics of attention logits, one number a query head; fields as in `records.HeadLogits`."""

    max: tuple[float, ...]
    std: tuple[float, ...]
    entropy: tuple[float, ...]
    saturated: tuple[float, ...]
    first_token: tuple[float, ...]


def sampled_logit_stats(
    q: Tensor, k: Tensor, scale: float | Tensor, *, mask: Tensor | None = None, softcap: float | None = None
) -> LogitStats:
    """Statistics of the logits (scale, softcap, mask) and probabilities of R sampled rows, in R·T memory.

    Args:
        q: [B, H, R, D], any real dtype.
        k: [B, K, T, D] with H a multiple of K.
        scale: factor on q·kᵀ, a number or broadcastable to [B, H, R, T].
        mask: broadcastable to [B, H, R, T]; boolean (True: attend), or additive (its finite part is a bias;
            entries at or below `MASKED` count as masked).
        softcap: c of c·tanh(logit / c), or None.

    Returns:
        One number a head, over all samples and rows. Rows without a key are left out; rows with one key are
        left out of entropy and saturation. NaN where nothing is left, and wherever a head has a NaN.

    Raises:
        ValueError: if the shapes do not fit.
    """
    logits, seen = _logits(q, k, scale, mask, softcap)  # [H, N, T] with N = B·R
    keys = seen.sum(-1)
    some, several = keys > 0, keys > 1
    masked = logits.masked_fill(~seen, -math.inf)
    probability = torch.softmax(masked.masked_fill(~some[..., None], 0.0), -1)
    entropy = torch.special.entr(probability).sum(-1) / keys.clamp(min=2).log()
    largest = probability.amax(-1)
    above = (largest > SATURATED).to(largest.dtype)
    return LogitStats(
        max=_floats(masked.amax((1, 2)).where(some.any(-1), math.nan)),
        std=_floats(_std(logits.flatten(1), seen.flatten(1))),
        entropy=_floats(_mean(entropy, several)),
        saturated=_floats(_mean(above.where(~largest.isnan(), math.nan), several)),
        first_token=_floats(_mean(probability[..., 0], some)),
    )


def _logits(
    q: Tensor, k: Tensor, scale: float | Tensor, mask: Tensor | None, softcap: float | None
) -> tuple[Tensor, Tensor]:
    """Logits [H, B·R, T] and which of them are not masked; a NaN is never masked away."""
    batch, heads, rows, width = q.shape
    key_heads, keys = k.shape[1], k.shape[2]
    if k.shape[0] != batch or k.shape[3] != width or heads % key_heads:
        raise ValueError(f"q [B, H, R, D] and k [B, K, T, D] do not fit: {[*q.shape]} and {[*k.shape]}")
    grouped = widen(q.detach()).reshape(batch, key_heads, heads // key_heads * rows, width)
    logits = (grouped @ widen(k.detach()).mT).reshape(batch, heads, rows, keys) * scale
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    seen = torch.ones_like(logits, dtype=torch.bool)
    if mask is not None:
        blocked = ~mask if mask.dtype is torch.bool else mask <= MASKED
        logits = logits + (0.0 if mask.dtype is torch.bool else mask.to(logits.dtype).where(~blocked, 0.0))
        seen = ~blocked | logits.isnan()
    return logits.transpose(0, 1).flatten(1, 2), seen.transpose(0, 1).flatten(1, 2)


def _mean(values: Tensor, chosen: Tensor) -> Tensor:
    """Mean over the last axis of the chosen entries; NaN where none is."""
    return values.where(chosen, 0.0).sum(-1) / chosen.sum(-1)


def _std(values: Tensor, chosen: Tensor) -> Tensor:
    """Standard deviation over the last axis of the chosen entries, in two passes; NaN where none is."""
    return _mean((values - _mean(values, chosen)[:, None]).square(), chosen).sqrt()


def logit_bound(q: Tensor, k: Tensor, scale: float | Tensor) -> tuple[float, ...]:
    """max|q| · max|k| · |scale| per query head: by Cauchy-Schwarz a bound on |logit| before softcap.

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
    longest_q, longest_k = _longest(q), _longest(k).repeat_interleave(heads // key_heads)
    factor = scale.detach().abs().flatten().to(longest_q) if isinstance(scale, Tensor) else abs(scale)
    return _floats(longest_q * longest_k * factor)


def _longest(rows: Tensor) -> Tensor:
    """Largest L2 norm over samples and rows of [B, H, N, D], per head."""
    return token_rms(rows).amax((0, 2)) * math.sqrt(rows.shape[-1])


def _floats(values: Tensor) -> tuple[float, ...]:
    return tuple(values.tolist())
