"""The places of the signal that are compared in two models, and what watches them in one forward."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from torch import Tensor, nn

from normprobe.capture.watch import Handler
from normprobe.diffing.pairs import BranchPair, Pairs
from normprobe.diffing.sketch import Sketch, Sketcher, arranged, bare
from normprobe.measures.padding import fitting
from normprobe.records import Anatomy, Branch, OpSite, WeightSite
from normprobe.records.diff import SiteKind

View = Literal["trunk", "write", "sum", "given"]


RETURNED = OpSite(path=".", op="output")  # no operation: stands for what the model returns


@dataclass(frozen=True)
class Tap:
    """What is looked at: an operand or the result of the operation at `site`; `path` is how a reader finds it."""

    site: OpSite
    view: View
    path: str
    branch: Branch | None = None
    weight: WeightSite | None = None


@dataclass(frozen=True)
class Site:
    """One place in both models."""

    kind: SiteKind
    a: Tap
    b: Tap
    stream: str = ""
    block: str = ""
    branch: int | None = None


def find_sites(a: Anatomy, b: Anatomy, pairs: Pairs) -> list[Site]:
    """Every place of matched parts that both models have."""
    sites: list[Site] = []
    for one, other in pairs.streams:
        at = a.streams.index(one), b.streams.index(other)
        first = _add(one.branches[0], "trunk", one.name), _add(other.branches[0], "trunk", other.name)
        sites += _both("entry", *first, stream=one.name)
        for pair in (pair for pair in pairs.branches if pair.streams == at):
            sites += _of_branch(a, b, pair)
    outside = _outside(a), _outside(b)
    if len(outside[0]) == len(outside[1]):
        for x, y in zip(*outside, strict=True):
            sites += _both("product", _given(x), _given(y))
    sites += _both("head", _head(a), _head(b))
    return sites


def _outside(anatomy: Anatomy) -> list[WeightSite]:
    """Weights of no branch: the stem of an image model, layers in a row without a residual stream."""
    return [w for w in anatomy.weights if w.branch is None and _plain(w) and "head" not in w.roles]


def _of_branch(a: Anatomy, b: Anatomy, pair: BranchPair) -> Iterator[Site]:
    about: dict[str, Any] = {"stream": pair.stream, "block": pair.a.block, "branch": pair.index[0]}
    read = _weight(a, pair, 0, "reader"), _weight(b, pair, 1, "reader")
    yield from _both("norm", _given(read[0], pair.a), _given(read[1], pair.b), **about)
    mixed = _weight(a, pair, 0, "writer"), _weight(b, pair, 1, "writer")
    if read != mixed:
        yield from _both("mixed", *map(_given, mixed), **about)
    sums = _merged(a, pair, 0), _merged(b, pair, 1)
    if sums[0].last and sums[1].last:
        if sums[0].count == sums[1].count:
            yield from _both("write", _add(pair.a, "write"), _add(pair.b, "write"), **about)
        yield from _both("stream", _add(pair.a, "sum"), _add(pair.b, "sum"), **about)


def _both(kind: SiteKind, a: Tap | None, b: Tap | None, **about: Any) -> Iterator[Site]:
    if a is not None and b is not None:
        yield Site(kind, a, b, **about)


@dataclass(frozen=True)
class _Merged:
    """How many branches one add writes, and whether the one asked about is the last of them."""

    count: int
    last: bool


def _merged(anatomy: Anatomy, pair: BranchPair, side: int) -> _Merged:
    branches, index = anatomy.streams[pair.streams[side]].branches, pair.index[side]
    held = [i for i, branch in enumerate(branches) if branch.add == branches[index].add]
    return _Merged(len(held), held[-1] == index)


def _add(branch: Branch, view: View, path: str = "") -> Tap | None:
    if view != "sum" and not branch.apart:
        return None
    return Tap(branch.add, view, path or branch.path, branch)


def _weight(anatomy: Anatomy, pair: BranchPair, side: int, role: str) -> WeightSite | None:
    """The first reader of a branch, or its last writer."""
    at = pair.streams[side], pair.index[side]
    found = [w for w in anatomy.weights if (w.stream, w.branch) == at and role in w.roles and _plain(w)]
    return None if not found else found[0] if role == "reader" else found[-1]


def _plain(weight: WeightSite) -> bool:
    """Whether what a weight is multiplied with is one tensor of the stream's tokens."""
    return weight.kind in ("linear", "conv")


def _given(weight: WeightSite | None, branch: Branch | None = None) -> Tap | None:
    """What a weight is multiplied with; behind a norm it is named by that."""
    if weight is None:
        return None
    path = branch.pre_norm if branch is not None and branch.pre_norm else weight.site.path
    return Tap(weight.site, "given", path, weight=weight)


def _head(anatomy: Anatomy) -> Tap | None:
    path = anatomy.head.path if anatomy.head is not None else None
    names = {path, anatomy.head.tied_to if anatomy.head is not None else None}
    found = [w for w in anatomy.weights if w.parameter in names and "head" in w.roles and _plain(w)]
    return _given(found[0]) if found else None


@dataclass
class Looks:
    """What one forward showed at its taps.

    Attributes:
        sketches: by tap; a tap that was not reached, or held no tensor of the shape wanted, is missing.
        order: taps in the order of time.
        returned: shape of the other model's output, None where there is none yet.
        unlike: taps whose tensor cannot be laid out as that of the other model, with both shapes.
    """

    sketcher: Sketcher
    padding: Sequence[Tensor] = ()
    wanted: Mapping[Tap, tuple[int, ...]] = field(default_factory=dict)
    returned: tuple[int, ...] | None = None
    sketches: dict[Tap, Sketch] = field(default_factory=dict)
    unlike: dict[Tap, str] = field(default_factory=dict)

    def at(self, tap: Tap, x: Any, factor: float = 1.0) -> None:
        """Keep the sketch of `x`, laid out as the other model's where that is known."""
        if not isinstance(x, Tensor) or not x.is_floating_point() or tap in self.sketches:
            return
        x = self._unpadded(x)
        shape = self.wanted.get(tap, self.returned if tap.site == RETURNED else None)
        laid = x if shape is None else arranged(x, shape)
        if laid is None:
            self.unlike[tap] = f"{shape} in A, {bare(x.shape)} in B"
        else:
            self.sketches[tap] = self.sketcher(laid).times(factor)

    def _unpadded(self, x: Tensor) -> Tensor:
        """`x` with zeros at padding, which models are free to fill as they like."""
        if not self.padding or x.dim() < 2:
            return x
        mask = fitting(self.padding, (x.shape[0], x.shape[1])) if x.dim() > 2 else None
        return x if mask is None else x.masked_fill(mask.to(x.device).view(*mask.shape, *[1] * (x.dim() - 2)), 0.0)


class Look(Handler):
    """Tells `looks` of one operation.

    Args:
        looks: where to keep what is seen.
        taps: those at this operation.
        model: whose parameters tell the operand of a product that is none.
    """

    def __init__(self, looks: Looks, taps: Sequence[Tap], model: nn.Module) -> None:
        self.looks, self.taps, self.model = looks, taps, model

    def before(self, arguments: Mapping[str, Any]) -> None:
        """Operands, before an operation in place overwrites them."""
        tensors = [value for value in arguments.values() if isinstance(value, Tensor)]
        for tap in self.taps:
            if tap.view == "given" and tap.weight is not None:
                self.looks.at(tap, self._other(tensors, tap.weight))
            elif tap.branch is not None and tap.view in ("trunk", "write") and len(tensors) == 2:
                place = tap.branch.trunk if tap.view == "trunk" else 1 - tap.branch.trunk
                self.looks.at(tap, tensors[place], float(arguments.get("alpha", 1.0)) if place == 1 else 1.0)

    def after(self, arguments: Mapping[str, Any], output: Any) -> None:
        """The sum."""
        for tap in self.taps:
            if tap.view == "sum":
                self.looks.at(tap, output)

    def _other(self, tensors: Sequence[Tensor], weight: WeightSite) -> Tensor | None:
        """The operand that the weight is multiplied with; None where it is not told."""
        own = self.model.get_parameter(weight.parameter).untyped_storage().data_ptr()
        found = [t for t in tensors if t.dim() > 1 and t.untyped_storage().data_ptr() != own and _fits(t, weight)]
        return found[0] if len(found) == 1 else None


def _fits(x: Tensor, weight: WeightSite) -> bool:
    size = weight.shape[1 - weight.output_axis] if len(weight.shape) == 2 else math.nan
    return weight.kind == "conv" or x.shape[-1] == size


def handlers(looks: Looks, taps: Sequence[Tap], model: nn.Module) -> dict[OpSite, Look]:
    """One handler for each operation that is looked at."""
    at: dict[OpSite, list[Tap]] = {}
    for tap in dict.fromkeys(taps):
        at.setdefault(tap.site, []).append(tap)
    return {site: Look(looks, held, model) for site, held in at.items()}
