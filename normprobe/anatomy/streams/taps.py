"""Where features are taken off a stream on its way: states that reach the output past the writes that follow."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence

from normprobe.anatomy.flow.steps import Flow
from normprobe.anatomy.streams.writes import Write


def taps(flow: Flow, chain: Sequence[Write], value: int, ancestors: Collection[int]) -> frozenset[int]:
    """The adds of `chain`, ids of their steps, from whose state a way to `value` passes none of those that follow.

    Args:
        flow: the flow.
        chain: the writes of one stream, in order.
        value: the output.
        ancestors: ids of the steps that it was computed from.
    """
    place = {write.step.id: i for i, write in enumerate(chain)}
    furthest: dict[int, float] = {value: -1.0}  # of the ways from a value, the least of the last writes that they pass
    for index in sorted(ancestors, reverse=True):
        step = flow.steps[index]
        least = min((furthest[v] for v in step.outputs if v in furthest), default=math.inf)
        passed = max(least, place.get(index, -1))
        for v in step.inputs:
            furthest[v] = min(furthest.get(v, math.inf), passed)
    return frozenset(write.step.id for i, write in enumerate(chain[:-1]) if furthest.get(write.output, math.inf) <= i)
