"""What residual writes of one stream show, told of several together from the small tensors that each left.

Dims: W writes, B batch, N tokens of all samples, K tokens that count, R sampled tokens, C features.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from normprobe import stats
from normprobe.measures import outliers
from normprobe.measures.massive import Entry
from normprobe.measures.moments import Moments, Sums, moments
from normprobe.measures.outliers import Outlier
from normprobe.measures.trunk import Tokens


class Sides(NamedTuple):
    """Medians over the tokens where trunk or write are not 0; NaN where there is none.

    Attributes:
        entry: token RMS of the trunk before the write.
        write: token RMS of the write; `largest` is not the median but the largest.
        ratio: RMS(write) / RMS(trunk before it).
        share: RMS(write) / RMS(state after it).
        cosine: between write and trunk, where both are not 0.
        angle: between the trunk before and the state after, in radians, where the trunk is not 0; of the sampled tokens
            where the state is half precision.
    """

    entry: float = math.nan
    write: float = math.nan
    ratio: float = math.nan
    share: float = math.nan
    cosine: float = math.nan
    angle: float = math.nan
    largest: float = math.nan


class Norms(NamedTuple):
    """Of every token of trunk and write, [N] each; their scalar product, None or NaN where the norms tell it."""

    trunk: Tensor
    write: Tensor
    product: Tensor | None


class Operands(NamedTuple):
    """Sampled tokens of trunk and write, [R, C] each, and their factors in the sum."""

    trunk: Tensor
    write: Tensor
    skip: float
    factor: float


class Seen(NamedTuple):
    """What one write shows at once; the large tensors are gone afterwards.

    Attributes:
        shape, dtype: of the state.
        tokens: which of it count.
        norms: of every token, [N].
        abs_max: largest |x|; `top` are the features [C] of its token.
        massive: entries that stand out.
        sampled: sampled tokens, [R, C].
        sums: over the tokens.
        sides, operands: of trunk and write; None where they were not seen apart.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    tokens: Tokens
    norms: Tensor
    abs_max: float
    top: Tensor
    massive: tuple[Entry, ...]
    sampled: Tensor
    sums: Sums
    sides: Norms | None
    operands: Operands | None


class Written(NamedTuple):
    """Numbers of one write, before they are given their place. Unit: the stream's own.

    Attributes:
        shape, dtype: of the state.
        tokens: how many tokens count.
        rms: over the tokens that count, of the token RMS; `argmax` is a flat index over all tokens.
        abs_max: largest |x|, at feature `channel`.
        massive: entries that stand out.
        stable_rank: of the matrix of the sampled tokens.
        rounding: what rounding the sum to bfloat16 and to float16 loses, RMS over the sampled tokens, as a share of the
            write's RMS.
        outliers: channels that are large at most of the sampled tokens.
        before: mean cosine between two different sampled tokens of the trunk before the write.
    """

    shape: tuple[int, ...]
    dtype: str
    tokens: int
    rms: stats.Summary
    abs_max: float
    channel: int
    massive: tuple[Entry, ...]
    stable_rank: float
    rounding: tuple[float, float]
    outliers: tuple[Outlier, ...]
    before: float
    moments: Moments
    sides: Sides


def alike(seen: Seen) -> Hashable:
    """Writes with equal keys can be told together: their small tensors have the same shapes and tokens."""
    return id(seen.tokens), seen.sampled.shape[-1], seen.sampled.dtype, seen.norms.device


def tell(writes: Sequence[Seen]) -> list[Written]:
    """The numbers of writes that are alike."""
    tokens, width = writes[0].tokens, writes[0].sampled.shape[-1]
    norms_WN = torch.stack([seen.norms for seen in writes])
    columns: dict[str, Sequence[Any]] = {
        "rms": _summaries(norms_WN / math.sqrt(width), tokens),
        "channel": torch.stack([seen.top for seen in writes]).abs().argmax(-1).tolist(),
        "stable_rank": stats.stable_ranks(torch.stack([seen.sampled for seen in writes])),
        "rounding": [_rounding(seen.operands) for seen in writes],
        "outliers": outliers.find(torch.stack([seen.sampled for seen in writes])),
        "before": [_cosine(seen.operands) for seen in writes],
        "moments": moments([seen.sums for seen in writes], norms_WN, tokens),
        "sides": [*map(_rounded, writes, _sides([_norms(seen) for seen in writes], tokens, math.sqrt(width)))],
    }
    return [
        Written(
            shape=seen.shape,
            dtype=str(seen.dtype).removeprefix("torch."),
            tokens=tokens.number,
            abs_max=seen.abs_max,
            massive=seen.massive,
            **dict(zip(columns, row, strict=True)),
        )
        for seen, row in zip(writes, zip(*columns.values(), strict=True), strict=True)
    ]


def _summaries(rms_WN: Tensor, tokens: Tokens) -> list[stats.Summary]:
    found = stats.summaries(tokens.counted(rms_WN))
    return found if tokens.kept is None else [one._replace(argmax=int(tokens.kept[one.argmax])) for one in found]


def _rounding(operands: Operands | None) -> tuple[float, float]:
    """What rounding the sum to bfloat16 and float16 loses, as a share of the write, which float32 loses from the sum as
    well where it is far smaller than the trunk. Not of several together: that is no faster."""
    if operands is None:
        return math.nan, math.nan
    added = operands.factor * operands.write.double()
    total = operands.skip * operands.trunk.double() + added
    rounded = (total.bfloat16(), total.half())
    size, *lost = (float(torch.linalg.vector_norm(x)) for x in (added, *(x.double() - total for x in rounded)))
    return (lost[0] / size, lost[1] / size) if size else (math.nan, math.nan)


def _cosine(operands: Operands | None) -> float:
    """Mean cosine between two different sampled tokens of the trunk; NaN with fewer than two that are not 0."""
    if operands is None:
        return math.nan
    rows = stats.widen(operands.trunk)
    norms = torch.linalg.vector_norm(rows, dim=-1, keepdim=True)
    count = int((norms != 0).sum())
    total = float(torch.linalg.vector_norm((rows / norms.where(norms != 0, 1.0)).sum(0)))
    return (total**2 - count) / (count * (count - 1)) if count > 1 else math.nan


def _rounded(seen: Seen, sides: Sides) -> Sides:
    """`sides` with the angle of a state in half precision, which the rounding of the sum turns too."""
    if seen.operands is None or seen.dtype in (torch.float32, torch.float64):
        return sides
    trunk = seen.operands.skip * stats.widen(seen.operands.trunk)
    before, after = (x / torch.linalg.vector_norm(x, dim=-1, keepdim=True) for x in (trunk, seen.sampled))
    apart, along = (torch.linalg.vector_norm(x, dim=-1) for x in (before - after, before + after))
    angles = 2 * torch.atan2(apart, along)
    known = angles[(trunk != 0).any(-1)]
    return sides._replace(angle=stats.medians(known[None])[0] if len(known) else math.nan)


def _norms(seen: Seen) -> Tensor | None:
    """Of trunk and write, their product, and of the state after, [4, N]."""
    if seen.sides is None:
        return None
    trunk, write, product = seen.sides
    return torch.stack((trunk, write, torch.full_like(trunk, math.nan) if product is None else product, seen.norms))


def _sides(norms: Sequence[Tensor | None], tokens: Tokens, root: float) -> list[Sides]:
    there = [each for each in norms if each is not None]
    if not there:
        return [Sides()] * len(norms)
    norms_W4K = tokens.counted(torch.stack(there)).double()
    if bool((norms_W4K[:, :2] != 0).all()):
        medians = stats.medians(_against(norms_W4K, root).flatten(0, 1))
        found = [Sides(*medians[start : start + 6]) for start in range(0, len(medians), 6)]
    else:
        found = [_some(norms_4K, root) for norms_4K in norms_W4K]
    largest = (norms_W4K[:, 1].amax(-1) / root).tolist()
    told = iter([one._replace(largest=top) for one, top in zip(found, largest, strict=True)])
    return [Sides() if each is None else next(told) for each in norms]


def _against(norms_W4K: Tensor, root: float) -> Tensor:
    """The numbers of `Sides` of every token, [W, 6, K], from the norms of trunk and write, what is known of their
    product, and the norms after."""
    trunk, write, product, after = norms_W4K.unbind(1)
    product = product.where(~product.isnan(), (after.square() - trunk.square() - write.square()) / 2)
    cosine = (product / (trunk * write)).clamp(-1, 1)
    turned = cosine.where(write != 0, 0.0)
    angle = torch.atan2(write * (1 - turned.square()).sqrt(), trunk + write * turned).where(after > 0, math.nan)
    return torch.stack((trunk / root, write / root, write / trunk, write / after, cosine, angle), 1).float()


def _some(norms_4K: Tensor, root: float) -> Sides:
    """Of one write with tokens that are 0 in its trunk or in itself."""
    trunk, write = norms_4K[:2] != 0
    either = trunk | write
    if not bool(either.any()):
        return Sides(entry=0.0, write=0.0)
    columns = zip(_against(norms_4K[None], root)[0], (*(either,) * 4, trunk & write, trunk), strict=True)
    return Sides(*(stats.medians(row[None, some])[0] if bool(some.any()) else math.nan for row, some in columns))
