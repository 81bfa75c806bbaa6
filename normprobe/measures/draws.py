"""Which distribution the values of a weight were drawn from, from a seeded sample of them.

Dims: R rows, C columns of the weight as a matrix, n values looked at.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from normprobe.measures.recipes import truncated_std
from normprobe.records.init import Distribution

SAMPLE = 1 << 14  # values of a weight that are looked at
CUTS = (2.0, 3.0)  # ends of truncated normals, in standard deviations before the cut
_FEWEST = 100  # values; fewer do not tell a distribution
_ORDERED = 2048  # values whose order is compared with a distribution
_KS = 2.23  # √n · largest distance of the distribution functions: P = 1e-4 (Kolmogorov; Smirnov 1948)
_SHORT = math.log(1e-4)  # a whole normal must have so small a largest value more rarely for a cut to be claimed
_RARE = math.log(1e-5)  # of the largest value of a normal sample
_WIDE = 3.29  # standard errors on each side: 99.9 %
_FAR = 6.0  # standard errors that rows may differ by
_USUAL = 1 << 13  # columns
_FULL_ROWS, _LONGEST = 8, 1 << 17  # rows that are compared whole, and how long they may be


@dataclass(frozen=True)
class Fit:
    """What was found.

    Attributes:
        distribution: the name.
        mean, std: of the values; about zero where the distribution is known.
        interval: of the standard deviation that such values are drawn with (99.9 %).
        cut: where a truncated normal ends, in standard deviations before the cut.
        count: values looked at.
        exact: whether these were all.
    """

    distribution: Distribution
    mean: float
    std: float
    interval: tuple[float, float]
    cut: float | None
    count: int
    exact: bool


def fit(weight: Tensor, seed: int, *, kernel: bool = False, table: bool = False) -> Fit:
    """The distribution of a weight's values.

    Normal, truncated normal (at ±2 or ±3 standard deviations) and uniform distributions about zero are told by the
    Kolmogorov-Smirnov distance, the largest value and, of the normal, the kurtosis; of several that fit, by
    likelihood. All rows, and all columns, must vary alike (χ²). A truncated normal that the sample does not tell from
    a whole one counts as normal. False claims of each of these tests are rarer than 1 in 1000.

    Args:
        weight: two axes or more, of a floating dtype.
        seed: of the sample of at most 2^14 values, on the crossings of random rows and columns.
        kernel: of a convolution: the first axis numbers the rows, all others the columns; else the last one alone
            numbers the columns.
        table: rows of zeros (padding) are left out.
    """
    matrix = weight.detach().flatten(1) if kernel else weight.detach().flatten(0, -2)
    grid = _sample(matrix, seed)
    if table and bool((kept := grid.ne(0).any(1)).any()):
        grid = grid[kept]
    exact = grid.numel() == weight.numel()
    x = grid.float()
    step = float(torch.finfo(weight.dtype).eps)
    least, most = (float(end) for end in x.aminmax())  # NaN where any value is
    if not math.isfinite(least) or not math.isfinite(most) or least == most:
        return _single(weight, float(x.flatten()[0]), x.numel())
    values = _Values.of(x, step)
    side = _orthogonal(matrix, seed, step)
    if side is not None:
        return Fit("orthogonal", values.mean, side, _around(side, 1e-3 + step), None, x.numel(), exact)
    name, cut = _named(values)
    std = values.root if name != "unknown" else math.sqrt(max(values.root**2 - values.mean**2, 0.0))
    return Fit(name, values.mean, std, _interval(values, name, std), cut, x.numel(), exact)


def _single(weight: Tensor, first: float, count: int) -> Fit:
    """Of a sample that is one number, or not finite: whether the whole weight is that number."""
    if not bool((weight == first).all()):
        return Fit("unknown", math.nan, math.nan, (math.nan, math.nan), None, count, False)
    name: Distribution = "constant" if first else "zero"
    return Fit(name, first, 0.0, (0.0, 0.0), None, weight.numel(), True)


@dataclass(frozen=True)
class _Values:
    """The sample [R, C] with its squares, moments about zero, and the spacing of numbers in its dtype."""

    x: Tensor
    squares: Tensor
    mean: float
    root: float
    kurtosis: float
    largest: float
    step: float

    @classmethod
    def of(cls, x: Tensor, step: float) -> _Values:
        peak = float(x.abs().max())
        unit = x / peak  # whose squares neither overflow nor vanish
        squares = unit.square()
        square = float(squares.mean())
        kurtosis = float((squares * squares).mean()) / square**2
        return cls(x, squares, float(unit.mean()) * peak, math.sqrt(square) * peak, kurtosis, peak, step)

    @property
    def n(self) -> int:
        return self.x.numel()


def _sample(matrix: Tensor, seed: int) -> Tensor:
    """The crossings of random rows and columns, all of them where the matrix is small; on the processor."""
    rows, columns = matrix.shape
    if matrix.numel() <= SAMPLE:
        return matrix.cpu()
    side = math.isqrt(SAMPLE)
    wide = min(columns, max(side, SAMPLE // rows))
    high = min(rows, SAMPLE // wide)
    picked, across = (p.to(matrix.device) for p in _picks(seed, (rows, high), (columns, wide)))
    if columns <= _USUAL:  # copying whole rows costs less than picking out entries
        return matrix.index_select(0, picked).index_select(1, across).cpu()
    return matrix[picked[:, None], across].cpu()


@lru_cache(maxsize=64)  # weights of one shape are looked at in the same places
def _picks(seed: int, *parts: tuple[int, int]) -> tuple[Tensor, ...]:
    """For each (size, count) that many numbers below the size, each from a stretch of its own, in order."""
    generator = torch.Generator().manual_seed(seed)
    found = []
    for size, count in parts:
        edges = torch.arange(count + 1, device="cpu") * size // count
        found.append(edges[:-1] + (torch.rand(count, generator=generator, device="cpu") * edges.diff()).long())
    return tuple(found)


def _orthogonal(matrix: Tensor, seed: int, step: float) -> float | None:
    """The RMS of the entries where the rows, or the columns of a higher matrix, are orthogonal and of one length."""
    if min(matrix.shape) < 4 or max(matrix.shape) > _LONGEST:
        return None
    long = matrix if matrix.shape[0] <= matrix.shape[1] else matrix.T
    (picked,) = _picks(seed, (len(long), min(_FULL_ROWS, len(long))))
    some = long[picked.to(long.device)].double().cpu()
    products = some @ some.T
    length = float(products.diagonal().mean())
    apart = products - length * torch.eye(len(some), dtype=torch.float64, device="cpu")
    if not length > 0 or float(apart.abs().max()) > (1e-4 + step) * length:
        return None
    return math.sqrt(length / some.shape[1])


def _named(values: _Values) -> tuple[Distribution, float | None]:
    """The distribution about zero that all values come from, and its cut; `unknown` where none fits."""
    n, std = values.n, values.root
    centred = abs(values.mean) <= 4.5 * std / math.sqrt(n)
    if n < _FEWEST or not centred:
        return "unknown", None
    if not (_alike(values.squares, values.kurtosis) and _alike(values.squares.T, values.kurtosis)):
        return "unknown", None
    flat = values.x.flatten()
    ordered = flat[:: -(-n // _ORDERED)].sort().values
    found: list[tuple[float, Distribution, float | None]] = []
    end = values.largest
    if _follows(ordered, lambda v: (v + end) / (2 * end)):
        found.append((-math.log(2 * end) * n, "uniform", None))
    for cut in CUTS:
        found += _truncated(ordered, values, cut)
    if _normal(ordered, values):
        found.append((-(0.5 + math.log(math.sqrt(2 * math.pi) * std)) * n, "normal", None))
    _, name, cut_at = max(found, key=lambda row: row[0], default=(0.0, "unknown", None))
    return name, cut_at


def _normal(ordered: Tensor, values: _Values) -> bool:
    n, std = values.n, values.root
    usual = _below_largest(values) > _RARE and math.log(max(n * _beyond(values), 1e-300)) > _RARE
    tails = abs(values.kurtosis - 3) <= 5 * math.sqrt(24 / n) + 12 / n
    return usual and tails and _follows(ordered, lambda v: torch.special.ndtr(v / std))


def _beyond(values: _Values) -> float:
    """The share of a normal of this scale that lies above the largest value."""
    return math.erfc(values.largest / values.root / math.sqrt(2))


def _below_largest(values: _Values) -> float:
    """The log-probability that a normal sample of this scale and size has no larger value."""
    return values.n * math.log1p(-min(_beyond(values), 1 - 1e-12))


def _truncated(ordered: Tensor, values: _Values, cut: float) -> list[tuple[float, Distribution, float | None]]:
    """The log-likelihood of a normal cut at ±cut deviations, where it fits and a whole one seldom ends there."""
    n = values.n
    if _below_largest(values) > _SHORT:
        return []
    whole = values.root / truncated_std(cut)
    inside = math.erf(cut / math.sqrt(2))
    if values.largest > cut * whole * (1 + _WIDE * 0.6 / math.sqrt(n) + values.step):
        return []
    if not _follows(ordered, lambda v: (torch.special.ndtr(v / whole) - (1 - inside) / 2) / inside):
        return []
    each = math.log(inside * math.sqrt(2 * math.pi) * whole) + (values.root / whole) ** 2 / 2
    return [(-each * n, "truncated_normal", cut)]


def _follows(ordered: Tensor, distribution: Callable[[Tensor], Tensor]) -> bool:
    """Whether sorted values follow a distribution function (Kolmogorov-Smirnov)."""
    n = len(ordered)
    ahead = distribution(ordered) - torch.arange(n, device=ordered.device) / n
    low, high = (float(v) for v in ahead.aminmax())
    return max(high, 1 / n - low) * math.sqrt(n) <= _KS


def _alike(squares: Tensor, kurtosis: float) -> bool:
    """Whether the mean squares of all rows are as equal as those of independent values of one distribution are: the
    sum of their squared deviations is about χ² with R − 1 degrees of freedom."""
    rows, columns = squares.shape
    if rows < 4 or columns < 4:
        return True
    means = squares.mean(1)
    spread = float((means / means.mean() - 1).square().sum()) * columns / max(kurtosis - 1, 0.1)
    heavy = 1 + 12 / columns  # few columns: the sums are not normal themselves
    return spread <= rows - 1 + _FAR * math.sqrt(2 * rows * heavy)


def _interval(values: _Values, name: Distribution, std: float) -> tuple[float, float]:
    """The 99.9 % interval of the standard deviation: √((κ − 1) / 4n) a standard error, κ the kurtosis; of the uniform
    distribution the largest value, which lies within ln(1000) / n of its end."""
    n, step = values.n, values.step
    if name == "uniform":
        end = values.largest / math.sqrt(3)
        return end * (1 - step), end * (1 + math.log(1000) / n + step)
    return _around(std, _WIDE * math.sqrt(max(values.kurtosis - 1, 0.0) / (4 * n)) + step / 2)


def _around(std: float, share: float) -> tuple[float, float]:
    return std * (1 - share), std * (1 + share)
