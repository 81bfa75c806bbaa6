"""Pieces of the flow that could be a norm written out: they close over one signal and hold a statistic."""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from dataclasses import dataclass

from normprobe.anatomy.flow.ops import Role, base
from normprobe.anatomy.flow.steps import Flow, Step

_INSIDE = frozenset({Role.ACT, Role.SCALE, Role.SHIFT, Role.MOVE, Role.POOL, Role.REDUCE, Role.GATE, Role.ADD})
_STATISTICS = frozenset({Role.POOL, Role.REDUCE})
_MOST_STEPS, _MOST_CLOSINGS = 30, 3


@dataclass(frozen=True)
class Region:
    """Steps between the value `origin` and the value `end`, both shaped alike; `core` is the step that divides."""

    origin: int
    end: int
    steps: frozenset[int]
    core: Step


def find_regions(flow: Flow) -> Iterator[list[Region]]:
    """For each place that could be a norm its candidate regions, the best guess first.

    A fused norm kernel is a region of its own. Elsewhere a product or quotient of two signals is followed back until
    everything comes from one earlier value; the ways may close several times (first over x − mean, then over x).
    """
    for step in flow.steps:
        if step.role is Role.NORM and step.group is None:
            closings = [Region(step.inputs[0], step.outputs[0], frozenset({step.id}), step)]
        elif step.role is Role.GATE and base(step.node.op) in (
            "aten.mul",
            "aten.div",
            "aten.mul_",
            "aten.div_",
        ):
            closings = list(_closings(flow, step))[::-1]
        else:
            continue
        if closings:
            yield [region for closing in closings for region in _extensions(flow, closing)]


def _closings(flow: Flow, last: Step) -> Iterator[Region]:
    """Regions that end in `last`, the smallest first."""
    end = last.outputs[0]
    heap = [(-flow.producer.get(v, -1), v) for v in last.inputs]
    heapq.heapify(heap)
    seen, steps, statistic, found = set(last.inputs), {last.id}, False, 0
    while heap and len(steps) <= _MOST_STEPS and found < _MOST_CLOSINGS:
        if len(heap) == 1 and statistic and flow.shape(heap[0][1]) == flow.shape(end):
            region = Region(heap[0][1], end, frozenset(steps), last)
            if not _leaks(flow, region):
                found += 1
                yield region
        _, value = heapq.heappop(heap)
        step = flow.made_by(value)
        if step is None or step.role not in _INSIDE:
            return
        steps.add(step.id)
        statistic = statistic or step.role in _STATISTICS
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
    """The region with the gain, offset and casts that follow it, the longest first, and the region itself last."""
    found = [region]
    while True:
        readers = flow.readers(region.end)
        if len(readers) != 1 or region.end in flow.outputs or len(found) > 4:
            return found[::-1]
        step = readers[0]
        scaled = step.role in (Role.SCALE, Role.SHIFT) and len(step.inputs) == 1
        cast = step.role is Role.MOVE and base(step.node.op) == "aten._to_copy"
        if not (scaled or cast) or flow.shape(step.outputs[0]) != flow.shape(region.end):
            return found[::-1]
        region = Region(region.origin, step.outputs[0], region.steps | {step.id}, region.core)
        found.append(region)
