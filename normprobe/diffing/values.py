"""The values of weights and biases that stand at the same place in two models."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor, nn

from normprobe.capture.storage import widened
from normprobe.diffing.pairs import BranchPair, Pairs, Side
from normprobe.records import Anatomy, Branch, WeightSite
from normprobe.records.diff import Relation, WeightPair
from normprobe.records.parts import whole

_READ = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_TIGHT = 1e-5  # choice: of a scaled or reordered weight in float32; half precision has its own spacing
_ROLES = ("reader", "inner", "writer")
Names: TypeAlias = tuple[str, ...]


class Apart(NamedTuple):
    """How many elements of a weight are other ones in B, where the output of A hangs on them and where it does not."""

    reached: int
    unreached: int


@dataclass(frozen=True)
class _Held:
    """One parameter, its output features, which lie along `axis`, along the first; `wide` says whether it is a
    weight."""

    name: str
    values: Tensor
    wide: bool
    axis: int = 0


def holdings(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers by name, shared ones under every name."""
    return dict(model.named_parameters(remove_duplicate=False)) | dict(model.named_buffers(remove_duplicate=False))


def print_of(model: nn.Module) -> Side:
    """What tells a branch of `model` from others of its kind: the size of its weights to three digits."""
    named = holdings(model)

    def mark(branch: Branch) -> str:
        held = [named[name] for name in branch.parameters if name in named and named[name].is_floating_point()]
        if any(t.is_meta for t in held):
            return ""
        return f"{math.sqrt(sum(float(widened(t.detach()).double().square().sum()) for t in held)):.3g}"

    return mark


def compare_weights(
    a: tuple[Anatomy, Mapping[str, Tensor]], b: tuple[Anatomy, Mapping[str, Tensor]], pairs: Pairs, seed: int
) -> tuple[WeightPair, ...]:
    """Every weight and bias of matched branches, the weights outside of them (embeddings, the head, others), and what
    else is no gain of a norm, in the order of registration where that has the same shapes in both.

    Where a branch holds as many weights of one role in both models they are compared in order; where it does not
    (queries, keys and values in one weight or in three) all of that role are compared as one, feature by feature.

    Args:
        a: Anatomy and parameters by name of the first model.
        b: those of the second model.
        pairs: the branches that belong together.
        seed: of the projection that tells reordered features.
    """
    rows = [row for one, other in _together(a, b, pairs) if (row := _compared(one, other, seed)) is not None]
    return tuple({(row.a, row.b): row for row in rows}.values())


def other_values(
    a: tuple[Anatomy, Mapping[str, Tensor]],
    b: tuple[Anatomy, Mapping[str, Tensor]],
    pairs: Pairs,
    gradients: Mapping[str, Tensor],
) -> dict[tuple[Names, Names], Apart]:
    """Where the values of weights are apart, by their names in A and B.

    Args:
        a: as for `compare_weights`.
        b: likewise.
        pairs: likewise.
        gradients: of A's output by the name of the parameter; it counts as hanging on what has none here.
    """
    apart = {}
    for one, other in _together(a, b, pairs):
        x, y = _stacked(one), _stacked(other)
        if x is not None and y is not None and x.shape == y.shape:
            slope = torch.cat([_slope(each, gradients).to(x.device) for each in one])
            apart[_names(one), _names(other)] = _apart(x, y, slope)
    return apart


def _names(held: Sequence[_Held]) -> Names:
    return tuple(each.name for each in held)


def _slope(held: _Held, gradients: Mapping[str, Tensor]) -> Tensor:
    """The gradient as the values stand in `held`."""
    known = gradients.get(held.name)
    if known is None:
        return torch.ones((), device=held.values.device).expand(held.values.shape)
    return known.movedim(held.axis, 0)[: len(held.values)] if known.dim() else known.reshape(1)


def _apart(a: Tensor, b: Tensor, slope: Tensor) -> Apart:
    """Elements that are further apart than rounding to the wider spacing puts them, with and without a gradient."""
    spacing = max(torch.finfo(t.dtype).eps for t in (a, b))
    x, y = (t.detach().to("cpu", torch.float64) for t in (a, b))
    other = ~((x - y).abs() <= spacing * torch.maximum(x.abs(), y.abs()))
    reached = (slope != 0).cpu()
    return Apart(int((other & reached).sum()), int((other & ~reached).sum()))


def _together(
    a: tuple[Anatomy, Mapping[str, Tensor]], b: tuple[Anatomy, Mapping[str, Tensor]], pairs: Pairs
) -> Iterator[tuple[list[_Held], list[_Held]]]:
    """Parameters that stand at the same place: one of each model, or several that are compared as one."""
    rows = [*_placed(a, b, pairs)]
    yield from rows
    left = [_left(*held, [each.name for row in rows for each in row[side]]) for side, held in enumerate((a, b))]
    if [one.values.shape for one in left[0]] == [one.values.shape for one in left[1]]:
        yield from (([one], [other]) for one, other in zip(*left, strict=True))


def _placed(
    a: tuple[Anatomy, Mapping[str, Tensor]], b: tuple[Anatomy, Mapping[str, Tensor]], pairs: Pairs
) -> Iterator[tuple[list[_Held], list[_Held]]]:
    """The weights outside of branches, then those of matched branches with their biases."""
    for role in ("embedding", "head", "other"):
        yield from _matched(*_shared(_outside(*a, role), _outside(*b, role)))
    for pair in pairs.branches:
        for role in _ROLES:
            held = _inside(*a, pair, 0, role), _inside(*b, pair, 1, role)
            for wide in (True, False):
                one, other = ([each for each in side if each.wide is wide] for side in held)
                yield from _matched(one, other)


def _left(anatomy: Anatomy, named: Mapping[str, Tensor], placed: Sequence[str]) -> list[_Held]:
    """Parameters of no weight that was placed and of no norm: added positions, biases outside of branches, scales."""
    names = set(named)  # of whole ones
    gains = [whole(name, names) for norm in anatomy.norms for name in (norm.weight, norm.bias) if name is not None]
    seen = {id(named[name]) for name in (*placed, *gains) if name in named}
    left: dict[int, _Held] = {}
    for name, held in named.items():
        if isinstance(held, nn.Parameter) and _readable(name, named) and id(held) not in seen:
            values = held.detach() if held.dim() else held.detach().reshape(1)
            left.setdefault(id(held), _Held(name, values, held.dim() > 1))
    return list(left.values())


def _outside(anatomy: Anatomy, named: Mapping[str, Tensor], role: str) -> list[_Held]:
    return [_weight(w, named) for w in anatomy.weights if role in w.roles and _readable(w.parameter, named)]


def _shared(a: list[_Held], b: list[_Held]) -> tuple[list[_Held], list[_Held]]:
    """Embeddings and heads of two vocabularies, cut to the ids that both have."""
    if len(a) != len(b):
        return a, b
    sizes = [min(len(one.values), len(other.values)) for one, other in zip(a, b, strict=True)]
    cut = [
        [_Held(h.name, h.values[:size], h.wide, h.axis) for h, size in zip(side, sizes, strict=True)] for side in (a, b)
    ]
    return cut[0], cut[1]


def _inside(anatomy: Anatomy, named: Mapping[str, Tensor], pair: BranchPair, side: int, role: str) -> list[_Held]:
    at, branch = (pair.streams[side], pair.index[side]), (pair.a, pair.b)[side]
    sites = [w for w in anatomy.weights if (w.stream, w.branch) == at and role in w.roles]
    held = [_weight(w, named) for w in sites if _readable(w.parameter, named)]
    names = {"reader": branch.readers, "writer": branch.writers}.get(role, ())
    flat = [name for name in names if _readable(name, named) and named[name].dim() == 1]
    return held + [_Held(name, named[name].detach(), False) for name in flat]


def _readable(name: str, named: Mapping[str, Tensor]) -> bool:
    held = named.get(name)
    if held is None or type(held) not in (Tensor, nn.Parameter) or held.layout is not torch.strided:
        return False
    return held.dtype in _READ and held.numel() > 0 and not held.is_meta


def _weight(site: WeightSite, named: Mapping[str, Tensor]) -> _Held:
    values = named[site.parameter].detach()
    if site.kind == "embedding":
        return _Held(site.parameter, values, True)
    return _Held(site.parameter, values.movedim(site.output_axis, 0), True, site.output_axis)


def _matched(a: list[_Held], b: list[_Held]) -> Iterator[tuple[list[_Held], list[_Held]]]:
    """One by one where there are as many in both models, else all as one."""
    if len(a) == len(b):
        yield from (([one], [other]) for one, other in zip(a, b, strict=True))
    else:
        yield a, b


def _compared(a: Sequence[_Held], b: Sequence[_Held], seed: int) -> WeightPair | None:
    if a and b:
        return _pair(a, b, seed)
    if all(_nothing(each.values) for each in (*a, *b)):
        return None  # biases of zero and none at all do the same
    names = _names(a), _names(b)
    count = sum(each.values.numel() for each in (*a, *b))
    return WeightPair(a=names[0], b=names[1], relation="unlike", distance=math.nan, factor=math.nan, count=count)


def _nothing(values: Tensor) -> bool:
    return values.dim() == 1 and not bool(values.any())


def _pair(a: Sequence[_Held], b: Sequence[_Held], seed: int) -> WeightPair:
    names = _names(a), _names(b)
    x, y = _stacked(a), _stacked(b)
    count = sum(each.values.numel() for each in a)
    if x is None or y is None or x.shape != y.shape:
        return WeightPair(a=names[0], b=names[1], relation="unlike", distance=math.nan, factor=math.nan, count=count)
    relation, distance, factor = relate(x, y, seed)
    return WeightPair(a=names[0], b=names[1], relation=relation, distance=distance, factor=factor, count=count)


def _stacked(held: Sequence[_Held]) -> Tensor | None:
    """All output features one below the other, [F, …]; None where they have different inputs, or there are none."""
    if len({each.values.shape[1:] for each in held}) != 1:
        return None
    first = held[0].values
    return first if len(held) == 1 else torch.cat([each.values.to(first.device) for each in held])


def relate(a: Tensor, b: Tensor, seed: int = 0) -> tuple[Relation, float, float]:
    """How the values of `b` come from those of `a`, with the distance and the factor of `WeightPair`.

    Args:
        a: [F, …] with F output features.
        b: of the same shape, perhaps of another dtype or on another device.
        seed: of the projection that tells reordered features.
    """
    spacing = max(torch.finfo(t.dtype).eps for t in (a, b))
    x, y = (t.to("cpu", torch.float64).flatten() for t in (a, b))
    sizes, product = (float(x.square().sum()), float(y.square().sum())), float(x @ y)
    distance = math.sqrt(float((y - x).square().sum()) / max(sizes)) if max(sizes) else 0.0
    factor = product / sizes[0] if sizes[0] else math.nan
    if bool(((x == y) | (x.isnan() & y.isnan())).all()):
        return "equal", 0.0, factor
    if _rounded(x, y, {a.dtype, b.dtype}):
        return "rounded", distance, factor
    tight = max(_TIGHT, spacing)
    if math.isfinite(factor) and factor and float((y - factor * x).norm()) <= tight * math.sqrt(sizes[1]):
        return "scaled" if abs(factor - 1) > tight else "different", distance, factor
    if _reordered(x.view(len(a), -1), y.view(len(b), -1), tight, seed):
        return "reordered", distance, factor
    return "different", distance, factor


def _rounded(x: Tensor, y: Tensor, dtypes: set[torch.dtype]) -> bool:
    """Whether one is the other after rounding: to the narrower dtype, or to 16 bits and back."""
    if dtypes == {torch.float16, torch.bfloat16}:  # two roundings of what neither holds any more
        return bool(((x - y).abs() <= 2.0**-8 * torch.maximum(x.abs(), y.abs())).all())
    return rounding(x, y, dtypes) is not None


def rounding(x: Tensor, y: Tensor, dtypes: set[torch.dtype]) -> tuple[int, torch.dtype] | None:
    """Which of two (0 or 1) holds the other's values rounded to which dtype, the narrower of `dtypes` or 16 bits; None
    where neither does. Both in float64."""
    tried = dict.fromkeys((max(dtypes, key=_spacing), torch.bfloat16, torch.float16))
    for dtype in tried:
        for side, (full, short) in enumerate(((y, x), (x, y))):
            if torch.equal(full.to(dtype).double(), short):
                return side, dtype
    return None


def _spacing(dtype: torch.dtype) -> float:
    return torch.finfo(dtype).eps


def _reordered(a: Tensor, b: Tensor, tight: float, seed: int) -> bool:
    """Whether the rows of `a` are those of `b` in another order: a random projection of each row tells."""
    if not bool(torch.isfinite(a).all() & torch.isfinite(b).all()):
        return False
    generator = torch.Generator().manual_seed(seed)
    ray = torch.randn(a.shape[1], generator=generator, dtype=torch.float64)
    rows = [torch.stack([t @ ray, t.norm(dim=1)], 1) for t in (a, b)]
    one, other = (row[row[:, 0].argsort()] for row in rows)
    return bool(((one - other).abs() <= tight * one[:, 1:].amax()).all())
