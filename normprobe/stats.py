"""Tensors to numbers: pure functions, float32 or wider inside, NaN in is NaN out.

Dims: R rows, C columns, L writes to a stream.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from normprobe.records import Growth

_SAFE = (1e-15, 1e15)  # norms between these have squares that float32 holds


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


def norms(rows: Tensor) -> Tensor:
    """L2 norm over the last axis, in one pass where no square overflows or vanishes.

    Args:
        rows: any shape, any real dtype.

    Returns:
        The shape of `rows` without its last axis, float32 (float64 for float64 input). NaN where an element is
        NaN, infinite where one is infinite.
    """
    dtype = rows.dtype if rows.dtype == torch.float64 else torch.float32
    found: Tensor = torch.linalg.vector_norm(rows.detach(), dim=-1, dtype=dtype)
    if not found.numel():
        return found
    if float(found.amin()) > _SAFE[0] and float(found.amax()) < _SAFE[1]:
        return found
    return token_rms(rows) * math.sqrt(rows.shape[-1])


def quantile_rows(rows: Tensor, levels: Sequence[float]) -> list[tuple[float, ...]]:
    """Quantiles of each row, linearly interpolated between order statistics.

    Args:
        rows: [K, N] with N at least 1, any real dtype.
        levels: levels in [0, 1].

    Returns:
        One number a level for each row; NaN throughout where an element of the row is NaN.

    Raises:
        ValueError: if `rows` is empty or a level lies outside [0, 1].
    """
    if rows.numel() == 0 or not all(0 <= level <= 1 for level in levels):
        raise ValueError(f"quantiles need an element and levels in [0, 1], found {rows.numel()}, {levels}")
    ordered = widen(rows.detach()).sort(-1).values
    places = [level * (rows.shape[-1] - 1) for level in levels]
    ends = [end for place in places for end in (math.floor(place), math.ceil(place))]
    found = ordered[:, [*ends, -1]].tolist()  # NaN sorts last
    return [
        (math.nan,) * len(levels)
        if math.isnan(row[-1])
        else tuple(_between(row[2 * i], row[2 * i + 1], place % 1) for i, place in enumerate(places))
        for row in found
    ]


def _between(low: float, high: float, part: float) -> float:
    return low if low == high else low + part * (high - low)


def medians(rows: Tensor) -> tuple[float, ...]:
    """Median of each row.

    Args:
        rows: [K, N] with N at least 1, any real dtype.

    Returns:
        One number a row, the mean of the two in the middle where N is even; NaN for a row with a NaN.

    Raises:
        ValueError: if a row has no element.
    """
    if rows.shape[-1] == 0:
        raise ValueError(f"medians need an element in each row, found shape {tuple(rows.shape)}")
    wide = widen(rows.detach())
    low = wide.median(-1).values  # the lower of two in the middle; selecting is far cheaper than sorting rows
    if rows.shape[-1] % 2:
        return tuple(low.tolist())
    high = -(-wide).median(-1).values
    return tuple(torch.where(low == high, low, (low + high) / 2).tolist())


def stable_rank(rows: Tensor) -> float:
    """‖X‖²_F / ‖X‖²₂ of the matrix X [R, C]: 1 where all rows are parallel, at most min(R, C).

    The largest eigenvalue of XXᵀ is the Rayleigh quotient of a column of its 128th power: too small by at most
    0.1 %, which happens where two eigenvalues are almost equal.

    Args:
        rows: [R, C], any real dtype; R·R numbers are held.

    Returns:
        NaN where all rows are 0 or one is not finite.

    Source: Rudelson & Vershynin 2007, sec. 1.1.
    """
    return stable_ranks(rows[None])[0]


def stable_ranks(matrices: Tensor) -> tuple[float, ...]:
    """`stable_rank` of each matrix of [K, R, C]."""
    gram = _gram(matrices)
    total = gram.diagonal(dim1=-2, dim2=-1).sum(-1)
    known = total.isfinite() & (total > 0)
    if not bool(known.all()):
        gram = gram.where(known[:, None, None], 1.0)  # anything with a rank
    gram = gram / total.where(known, 1.0)[:, None, None]
    power = gram
    for _ in range(7):
        power = power @ power
        power = power / power.diagonal(dim1=-2, dim2=-1).sum(-1)[:, None, None]
    column = power.diagonal(dim1=-2, dim2=-1).argmax(-1)
    columns = power.gather(-1, column[:, None, None].expand(-1, power.shape[-1], 1))
    quotient = columns.square().sum((-2, -1)) / (columns * (gram @ columns)).sum((-2, -1))
    return tuple(quotient.where(known, math.nan).tolist())


def _gram(matrices: Tensor) -> Tensor:
    """XXᵀ in float64; from float32 products where no square overflows or vanishes, in a third of the time."""
    gram = widen(matrices)
    gram = (gram @ gram.mT).double()
    lengths = gram.diagonal(dim1=-2, dim2=-1)
    if gram.numel() and not (_SAFE[0] ** 2 < float(lengths.min()) and float(lengths.max()) < _SAFE[1] ** 2):
        wide = matrices.double()
        return wide @ wide.mT
    return gram


def participation(weights: Sequence[float]) -> float:
    """(Σ w)² / Σ w²: how many of these weights carry the sum; NaN where there is none above 0 or one is NaN."""
    square = math.fsum(w * w for w in weights)
    return math.fsum(weights) ** 2 / square if square > 0 else math.nan


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
    return summaries(rms_tokens.flatten()[None])[0]


def summaries(rows: Tensor) -> list[Summary]:
    """`summary` of each row of [K, N]."""
    found = quantile_rows(rows, (0.5, 0.99, 1.0))
    places = widen(rows).argmax(-1).tolist()
    return [Summary(median, p99, top, at) for (median, p99, top), at in zip(found, places, strict=True)]


def relative_error(pairs: Iterable[tuple[Tensor, Tensor]]) -> float:
    """‖values − reference‖ / ‖reference‖ over all pairs (values, reference) together, L2, summed in float64.

    0 where both are 0, NaN where an element of either is not finite.
    """
    apart, size = 0.0, 0.0
    for values, reference in pairs:
        apart += float((values.double() - reference.double()).square().sum())
        size += float(reference.double().square().sum())
    if not math.isfinite(apart) or not math.isfinite(size):
        return math.nan
    return math.sqrt(apart / size) if size else (math.inf if apart else 0.0)


def growth(values: Sequence[float]) -> Growth:
    """Growth exponent of a residual stream: least squares of log rms on log l, l = 1 … L.

    Args:
        values: token-median RMS after each write, L writes.

    Returns:
        Exponent p of rms ∝ l^p, its 95 % interval (Student's t, L - 2 degrees of freedom) and R² (NaN where the stream
        is constant: there is no spread to explain); all NaN with fewer than four writes, or a value that is not finite
        or positive.

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
    fit = math.nan if total == 0 else 1.0 - rest / total
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
