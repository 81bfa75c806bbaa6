"""Pieces of the flow that could be a norm written out: they close over one signal and hold a statistic."""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from dataclasses import dataclass

from normprobe.anatomy.flow.ops import LIGHT, PRODUCTS, Role, base, foreign, slides
from normprobe.anatomy.flow.steps import Flow, Step

_INSIDE = frozenset({Role.ACT, Role.SCALE, Role.SHIFT, Role.MOVE, Role.POOL, Role.REDUCE, Role.GATE, Role.ADD})
_STATISTICS = frozenset({Role.POOL, Role.REDUCE})
_ROOTS = frozenset({"aten.sqrt", "aten.rsqrt", "aten.pow", "aten.sqrt_", "aten.rsqrt_"})
_MOST_STEPS, _MOST_CLOSINGS, _MOST_EXTENSIONS, _MOST_FACTORS, _MOST_MOVES = 30, 3, 5, 3, 4


@dataclass(frozen=True)
class Region:
    """Steps between the value `origin` and the value `end`, both shaped alike; `core` is the step that divides."""

    origin: int
    end: int
    steps: frozenset[int]
    core: Step


def find_regions(flow: Flow) -> Iterator[list[Region]]:
    """For each place that could be a norm its candidate regions, the best guess first.

    A fused norm kernel, and an operation that torch does not know, is a region of its own. Elsewhere a product or
    quotient of two signals is followed back until everything comes from one earlier value; the ways may close several
    times (first over x − mean, then over x). A non-linearity behind a learned factor, or one written as a quotient, may
    be a bounded stand-in; a factor from buffers may hold a stored variance.
    """
    for step in flow.steps:
        closings: list[Region] = []
        if (step.role is Role.NORM and step.group is None) or _opaque(flow, step):
            closings = [Region(step.inputs[0], step.outputs[0], frozenset({step.id}), step)]
        elif step.role is Role.GATE and base(step.node.op) in PRODUCTS:
            closings = list(_closings(flow, step))[::-1]
        elif step.role is Role.ACT:
            closings = _bounded(flow, step)
        elif step.role is Role.SCALE and len(step.inputs) == 1:
            closings = _stored(flow, step)
        regions = [region for closing in closings for region in _extensions(flow, closing)]
        if regions:
            yield regions


def _opaque(flow: Flow, step: Step) -> bool:
    """Whether a step is an operation of another library on one signal, whose first result is shaped like it."""
    alone = step.role is Role.HEAVY and foreign(step.node.op) and len(step.inputs) == 1
    return alone and flow.shape(step.inputs[0]) == flow.shape(step.outputs[0])


def _bounded(flow: Flow, step: Step) -> list[Region]:
    """A non-linearity with the learned factor, and the constants added to it, that stand before it."""
    steps, value, learned = {step.id}, step.inputs[0], False
    origin, inner = value, frozenset(steps)
    for _ in range(_MOST_FACTORS + _MOST_MOVES):
        maker = flow.made_by(value)
        if maker is None or maker.role not in LIGHT or len(maker.inputs) > 1:
            break
        steps.add(maker.id)
        value = maker.inputs[0]
        if maker.role is not Role.MOVE:
            learned = learned or (maker.role is Role.SCALE and bool(maker.parameters))
            origin, inner = value, frozenset(steps)
    region = Region(origin, step.outputs[0], inner, step)
    return [region] if learned and not _leaks(flow, region) else []


def _stored(flow: Flow, step: Step) -> list[Region]:
    """A factor that comes from buffers, with what is subtracted before it."""
    value, steps = step.inputs[0], {step.id}
    if not any(_root_of_buffer(flow, v) for v in step.statics) or flow.shape(value) != flow.shape(step.outputs[0]):
        return []
    found = [Region(value, step.outputs[0], frozenset(steps), step)]
    maker = flow.made_by(value)
    if maker is not None and maker.role is Role.SHIFT and len(maker.inputs) == 1:
        longer = Region(maker.inputs[0], step.outputs[0], frozenset({*steps, maker.id}), step)
        found = [longer, *found] if not _leaks(flow, longer) else found
    return found


def _root_of_buffer(flow: Flow, value: int) -> bool:
    """Whether a factor of one number a channel comes from a buffer by way of a square root."""
    if sum(n > 1 for n in flow.shape(value)) > 1 or not flow.levels.buffers(value):
        return False
    todo, seen = [value], {value}
    while todo:
        node = flow.trace.producer(todo.pop())
        if base(node.op) in _ROOTS:
            return True
        fresh = [v for v in node.inputs if v not in seen]
        seen.update(fresh)
        todo += fresh
    return False


def _closings(flow: Flow, last: Step) -> Iterator[Region]:
    """Regions that end in `last` and hold a statistic or something learned, the smallest first."""
    end = last.outputs[0]
    heap = [(-flow.producer.get(v, -1), v) for v in last.inputs]
    heapq.heapify(heap)
    seen, steps, told, found = set(last.inputs), {last.id}, False, 0
    while heap and len(steps) <= _MOST_STEPS and found < _MOST_CLOSINGS:
        if len(heap) == 1 and told and flow.shape(heap[0][1]) == flow.shape(end):
            region = Region(heap[0][1], end, frozenset(steps), last)
            if not _leaks(flow, region):
                found += 1
                yield region
        _, value = heapq.heappop(heap)
        step = flow.made_by(value)
        if step is None or not (step.role in _INSIDE or slides(step.node)):
            return
        steps.add(step.id)
        told = told or step.role in _STATISTICS or slides(step.node) or bool(step.parameters)
        for source in step.inputs:
            if source not in seen:
                seen.add(source)
                heapq.heappush(heap, (-flow.producer.get(source, -1), source))


def _leaks(flow: Flow, region: Region) -> bool:
    """Whether a value made inside is read outside."""
    for index in region.steps:
        for value in flow.steps[index].outputs:
            if value == region.end:
                continue
            if value in flow.outputs or any(s.id not in region.steps for s in flow.readers(value)):
                return True
    return False


def _extensions(flow: Flow, region: Region) -> list[Region]:
    """The region with the gain, offset, casts and views that follow it, the longest first, and the region itself
    last; only those that end in the shape that they begin in."""
    found = [region] if _alike(flow, region) else []
    for _ in range(_MOST_EXTENSIONS + _MOST_MOVES):
        readers = flow.readers(region.end)
        longer = None if len(readers) != 1 or region.end in flow.outputs else _extended(flow, region, readers[0])
        if longer is None or len(found) > _MOST_EXTENSIONS:
            break
        region = longer
        if _alike(flow, region):
            found.append(region)
    return found[::-1]


def _alike(flow: Flow, region: Region) -> bool:
    return flow.shape(region.end) == flow.shape(region.origin)


def _extended(flow: Flow, region: Region, step: Step) -> Region | None:
    """The region and the `step` that reads its end; None where that does something else to it."""
    added = step.role is Role.ADD and set(step.inputs) == {region.origin, region.end}  # a response norm's own skip
    if not added and (step.role not in LIGHT or len(step.inputs) != 1):
        return None
    longer = Region(region.origin, step.outputs[0], region.steps | {step.id}, region.core)
    viewed = None if _alike(flow, longer) or step.role is not Role.MOVE else _viewed(flow, region, step)
    return viewed or longer


def _viewed(flow: Flow, region: Region, step: Step) -> Region | None:
    """The region between a view of a larger tensor's elements and `step`, which gives them back their first shape."""
    shape, value, steps = flow.shape(step.outputs[0]), region.origin, region.steps | {step.id}
    for _ in range(_MOST_FACTORS):
        maker = flow.made_by(value)
        if maker is None or maker.role is not Role.MOVE or len(maker.inputs) != 1:
            return None
        value, steps = maker.inputs[0], steps | {maker.id}
        longer = Region(value, step.outputs[0], steps, region.core)
        if flow.shape(value) == shape:
            return None if _leaks(flow, longer) else longer
    return None
