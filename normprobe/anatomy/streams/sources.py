"""The nearest state of a trunk that a branch was computed from."""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from dataclasses import replace

from normprobe.anatomy.flow.ops import WEIGHTY, Role
from normprobe.anatomy.flow.steps import Flow
from normprobe.anatomy.flow.walk import Link
from normprobe.anatomy.streams.parts import region_to
from normprobe.anatomy.streams.writes import State


def common_source(flow: Flow, chain: Iterator[State], end: int) -> tuple[Link, tuple[int, ...], list[int]] | None:
    """The nearest value of `chain` that `end` was computed from, and the steps visited on the way back from `end`; None
    also where nothing weighty lies on that way, which is known before the walk where the chain begins later."""
    weighty = latest_weighty(flow).get(end)
    if weighty is None:
        return None
    candidates: dict[int, State] = {}
    reached = _enter(flow, chain, candidates, weighty, len(flow.steps))
    if reached > weighty:
        return None
    heap, seen = [(-flow.producer.get(end, -1), end)], {end}
    visited: list[int] = []
    while heap:
        order, value = heapq.heappop(heap)
        reached = _enter(flow, chain, candidates, -order - 1, reached)
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


def _enter(flow: Flow, chain: Iterator[State], candidates: dict[int, State], until: int, reached: int) -> int:
    """Enter the values of a chain until step `until` or one before it made one; the step that made the last."""
    while reached > until and (state := next(chain, None)) is not None:
        candidates[state[0].value] = state
        reached = flow.producer.get(state[0].value, -1)
    return reached


def unviewed(flow: Flow, link: Link, end: int) -> tuple[Link, list[int]]:
    """The state behind the views that a gate may read it through, and the steps from it to `end`."""
    value = link.value
    while (step := flow.made_by(value)) is not None and step.role is Role.MOVE and len(step.inputs) == 1:
        value = step.inputs[0]
    later = range(flow.producer.get(value, -1) + 1, flow.producer[end] + 1)
    return replace(link, value=value), sorted(region_to(flow, value, end, later))


def latest_weighty(flow: Flow) -> dict[int, int]:
    """For each value the latest step behind it that does more than to move or scale a signal; none has no entry."""
    if "latest weighty" not in flow.memo:
        latest: dict[int, int] = {}
        for step in flow.steps:
            behind = [latest[v] for v in step.inputs if v in latest]
            if step.role in WEIGHTY or behind:
                latest.update(dict.fromkeys(step.outputs, step.id if step.role in WEIGHTY else max(behind)))
        flow.memo["latest weighty"] = latest
    found: dict[int, int] = flow.memo["latest weighty"]
    return found
