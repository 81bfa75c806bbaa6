"""Residual adds: sums in which one side comes from an ancestor of the other by light steps, the other by heavy ones.

A shortcut that is a single projection (a strided convolution, say) or a pooling counts as light where the other side is
not linear.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from dataclasses import dataclass
from math import prod

from normprobe.anatomy.flow.ops import LIGHT, WEIGHTY, Role, base, slides
from normprobe.anatomy.flow.steps import Flow, Step
from normprobe.anatomy.flow.walk import Link, argument_value, light_chain, operand_factor, pools

_MOST = 0.75  # share of a concatenation that makes one part the trunk
_INTO = frozenset(
    {f"aten.{n}" for n in ("index_put", "index_put_", "slice_scatter", "select_scatter", "masked_scatter")}
)


@dataclass(frozen=True)
class Part:
    """One way from the trunk to a write: it ends in value `end` and consists of the steps `region`."""

    end: int
    region: frozenset[int]


@dataclass(frozen=True)
class Write:
    """One residual add.

    Attributes:
        step: the add.
        trunk: which of its inputs is the trunk, 0 or 1.
        source: the value from which trunk and branch part.
        skip_scale: constant factor on the trunk; None where it is not constant.
        whole: everything between `source` and this add.
        parts: the independent branches that `whole` is the sum of, in order of time (mostly `whole` alone).
        over: earlier residual adds that lie between `source` and this add: it is parallel to them.
        projected: whether the shortcut is a projection or a pooling.
    """

    step: Step
    trunk: int
    source: int
    skip_scale: float | None
    whole: Part
    parts: tuple[Part, ...]
    over: tuple[int, ...] = ()
    projected: bool = False

    @property
    def output(self) -> int:
        """The stream after this write."""
        return self.step.outputs[0]


def find_writes(flow: Flow) -> dict[int, Write]:
    """All residual adds by step id, in order of time."""
    writes: dict[int, Write] = {}
    for step in flow.steps:
        if step.role is not Role.ADD or len(step.inputs) != 2:
            continue
        shape = flow.shape(step.outputs[0])
        if any(flow.shape(v) != shape for v in step.inputs):
            continue
        for trunk, projected in ((0, False), (1, False), (0, True), (1, True)):
            write = _match(flow, step, trunk, writes, projected)
            if write is not None:
                writes[step.id] = write
                break
    return writes


def _match(flow: Flow, step: Step, trunk: int, writes: dict[int, Write], projected: bool = False) -> Write | None:
    end, side = step.inputs[1 - trunk], step.inputs[trunk]
    chain = _projected_chain(flow, side) if projected else _trunk_chain(flow, side, writes)
    hit = _common_source(flow, chain, end)
    if hit is None:
        return None
    link, over, visited = hit
    part = Part(end, _between(flow, link.value, visited))
    if not _carried(flow, link.value, part) or _filters(flow, part.region):
        return None
    if projected and (_projections(flow, side) & part.region or not _bends(flow, part.region)):
        return None
    parts = tuple(_split(flow, link.value, part, writes))
    scale = None if link.factor is None else link.factor * operand_factor(step, side)
    return Write(step, trunk, link.value, scale, part, parts, over, projected)


def _trunk_chain(flow: Flow, value: int, writes: dict[int, Write]) -> Iterator[tuple[Link, tuple[int, ...]]]:
    """The light chain of a trunk operand, going on through earlier residual adds along their trunks, and where tokens
    were put beside it."""
    over: tuple[int, ...] = ()
    outer: float | None = 1.0
    while True:
        link = Link(value)
        for link in light_chain(flow, value):
            factor = None if outer is None or link.factor is None else outer * link.factor
            yield Link(link.value, factor), over
        maker = flow.made_by(link.value)
        outer = None if outer is None or link.factor is None else outer * link.factor
        if maker is not None and maker.id in writes:
            over, value = (*over, maker.id), maker.inputs[writes[maker.id].trunk]
            continue
        kept = _kept(flow, maker) if maker is not None and maker.role is Role.MOVE else None
        if kept is None:
            return
        value = kept


def _projected_chain(flow: Flow, value: int) -> Iterator[tuple[Link, tuple[int, ...]]]:
    """The chain behind a shortcut's one projection, its poolings and the norms around them; empty without any."""
    changed = False
    for step in _shortcut(flow, value):
        changed = changed or step.role is Role.MATMUL or pools(step)
        if changed:
            yield Link(step.inputs[0], None), ()


def _projections(flow: Flow, value: int) -> frozenset[int]:
    return frozenset(s.id for s in _shortcut(flow, value) if s.role is Role.MATMUL)


def _shortcut(flow: Flow, value: int) -> Iterator[Step]:
    """The steps behind a shortcut over views, norms, poolings and at most one projection."""
    projected = False
    while (step := flow.made_by(value)) is not None:
        if step.role is Role.MATMUL and step.parameters and len(step.inputs) == 1 and not projected:
            projected = True
        elif step.role is not Role.NORM and not pools(step) and (step.role not in LIGHT or len(step.inputs) != 1):
            return
        yield step
        value = step.inputs[0]


def _common_source(
    flow: Flow, chain: Iterator[tuple[Link, tuple[int, ...]]], end: int
) -> tuple[Link, tuple[int, ...], list[int]] | None:
    """The nearest value of `chain` that `end` was computed from, and the steps visited on the way back from `end`."""
    candidates: dict[int, tuple[Link, tuple[int, ...]]] = {}
    reached = len(flow.steps)
    heap, seen = [(-flow.producer.get(end, -1), end)], {end}
    visited: list[int] = []
    while heap:
        order, value = heapq.heappop(heap)
        while reached >= -order:
            following = next(chain, None)
            if following is None:
                break
            candidates[following[0].value] = following
            reached = flow.producer.get(following[0].value, -1)
        if value in candidates:
            return (*candidates[value], visited)
        if -order < reached:
            return None  # the chain has ended, and everything left is older than it
        step = flow.made_by(value)
        if step is None:
            continue
        visited.append(step.id)
        for source in step.inputs:
            if source not in seen:
                seen.add(source)
                heapq.heappush(heap, (-flow.producer.get(source, -1), source))
    return None


def _between(flow: Flow, source: int, visited: list[int]) -> frozenset[int]:
    """Those of the visited steps that were computed from `source`."""
    live, region = {source}, set()
    for index in sorted(set(visited)):
        step = flow.steps[index]
        if any(v in live for v in step.inputs):
            live.update(step.outputs)
            region.add(index)
    return frozenset(region)


def _carried(flow: Flow, source: int, part: Part) -> bool:
    """Whether the branch carries its source on through heavy steps as a signal, not merely as the numbers of rows that
    it chooses (of a code book)."""
    heavy = {source: False}  # the values that carry it on, and whether heavy steps were passed
    for step in (flow.steps[i] for i in sorted(part.region)):
        carrying = [heavy[v] for v in step.inputs if v in heavy]
        if carrying:
            passed = step.role in WEIGHTY or any(carrying)
            heavy.update((v, passed) for v in step.outputs if flow.floating(v))
    return heavy.get(part.end, False)


def _filters(flow: Flow, region: frozenset[int]) -> bool:
    """Whether a region is no more than a sliding mean of the trunk (which takes a series' trend off it)."""
    steps = [flow.steps[i] for i in region]
    return not any(s.role is Role.NORM or (s.role in WEIGHTY and not slides(s.node)) for s in steps)


def _bends(flow: Flow, region: frozenset[int]) -> bool:
    """Whether a region is not linear in the signal."""
    bending = {Role.ACT, Role.GATE, Role.SOFTMAX, Role.ATTENTION}
    return any(flow.steps[i].role in bending for i in region)


def _heavy(flow: Flow, region: frozenset[int]) -> frozenset[int]:
    return frozenset(i for i in region if flow.steps[i].role in WEIGHTY)


def _split(flow: Flow, source: int, part: Part, writes: dict[int, Write]) -> list[Part]:
    """The independent branches whose sum is `part`; `part` itself where its summands share heavy steps."""
    *_, last = light_chain(flow, part.end)
    step = flow.made_by(last.value)
    merges = step is not None and step.role is Role.ADD and step.id in part.region and step.id not in writes
    if step is None or not merges or len(step.inputs) != 2:
        return [part]
    sides = [Part(v, _region_to(flow, source, v, part.region)) for v in step.inputs]
    heavy = [_heavy(flow, side.region) for side in sides]
    if not heavy[0] or not heavy[1] or heavy[0] & heavy[1]:
        return [part]
    found = [p for side in sides for p in _split(flow, source, side, writes)]
    return sorted(found, key=lambda p: min(_heavy(flow, p.region)))


def _region_to(flow: Flow, source: int, end: int, within: frozenset[int]) -> frozenset[int]:
    """The steps of `within` on ways from `source` to `end`."""
    todo = [end]
    visited: set[int] = set()
    while todo:
        step = flow.made_by(todo.pop())
        if step is None or step.id not in within or step.id in visited:
            continue
        visited.add(step.id)
        todo += [v for v in step.inputs if v != source]
    return _between(flow, source, sorted(visited))


def previous_write(flow: Flow, write: Write, writes: dict[int, Write]) -> Write | None:
    """The write that the trunk of `write` comes from by light steps, norms, activations and its own projection; None
    at the start of a stream."""
    passes = LIGHT | {Role.NORM, Role.ACT}
    value = write.source if write.projected else write.step.inputs[write.trunk]
    while True:
        step = flow.made_by(value)
        if step is None:
            return None
        if step.id in writes:
            return writes[step.id]
        kept = step.inputs[0] if step.role is Role.NORM else _kept(flow, step)
        if step.role not in passes or kept is None:
            return None
        value = kept


def _kept(flow: Flow, step: Step) -> int | None:
    """The input that a step with one signal keeps; of several the one that others are written into a part of, or put
    beside as a few more tokens."""
    if len(step.inputs) == 1:
        return step.inputs[0]
    name = base(step.node.op)
    if name in _INTO and argument_value(step.node.args[0]) == step.inputs[0]:
        return step.inputs[0]
    largest = max(step.inputs, key=lambda v: prod(flow.shape(v)), default=-1)
    if name == "aten.cat" and prod(flow.shape(largest)) >= _MOST * prod(flow.shape(step.outputs[0])):
        return largest
    return _rejoined(flow, step) if step.role is Role.MOVE and step.inputs else None


def _rejoined(flow: Flow, step: Step) -> int | None:
    """The value whose pieces `step` puts together again (the tokens of two streams, say); None where they come from
    several, or pieces are left out."""
    wholes: set[int] = set()
    for value in step.inputs:
        while (maker := flow.made_by(value)) is not None and maker.role is Role.MOVE and len(maker.inputs) == 1:
            value = maker.inputs[0]
        wholes.add(value)
    whole = wholes.pop()
    alike = prod(flow.shape(whole)) == prod(flow.shape(step.outputs[0]))
    return whole if not wholes and alike else None
