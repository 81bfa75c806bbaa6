"""What kind of residual path a chain of writes is: one trunk, several copies of it, a pair that read each other, …"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from normprobe.anatomy.flow.along import Along, axes
from normprobe.anatomy.flow.steps import Flow
from normprobe.anatomy.streams.copies import MOST_COPIES, copies, latest_stacked, mixed
from normprobe.anatomy.streams.trunks import behind
from normprobe.anatomy.streams.writes import Trunks, Write
from normprobe.records.anatomy import Topology

_SAME = Along(features=False, places=False)


def topology(flow: Flow, chain: Sequence[Write], trunks: Trunks) -> dict[str, Any]:
    """The word for the chain's residual path, and the number of parallel streams it consists of, as fields."""
    word, number = _topology(flow, chain, trunks)
    return {"topology": word, "copies": number}


def _topology(flow: Flow, chain: Sequence[Write], trunks: Trunks) -> tuple[Topology, int]:
    own = {w.step.id for w in chain}
    partners = {w.crossed for w in chain if w.crossed is not None} & trunks.writes.keys()
    if any(trunks.writes[i].crossed in own for i in partners):
        return "reversible", 1
    hops = [step for write in chain for step in behind(flow, write, trunks)]
    mixes = {s.id: value for s in hops if (value := mixed(flow, s)) is not None}
    over_depth = [i for i, value in mixes.items() if latest_stacked(flow, value) != value]
    numbers = [copies(flow, flow.steps[i]) for i in mixes if i not in over_depth]
    spread = {_spread(flow, write, chain[0].source) for write in chain}
    if numbers or (len(spread) == 1 and 1 < min(spread) <= MOST_COPIES):
        return "parallel_streams", max(numbers, default=min(spread))
    if all(write.way == "gated" for write in chain):
        return "gated", 1
    again = over_depth or any(step.id in trunks.merges or step.id in trunks.drawn for step in hops)
    return ("long_skips" if again else "ordinary"), 1


def _spread(flow: Flow, write: Write, start: int) -> int:
    """Over how many copies of the trunk the branch spreads its result: the size of the axes along which that repeats
    itself, and the trunk does at its `start` too (one result for all tokens is no copy of the trunk)."""
    shape, told, trunk = flow.shape(write.whole.end), axes(flow, write.whole.end), axes(flow, start)
    if told is None or trunk is None or flow.shape(start) != shape:
        return 1
    return math.prod(n for n, own, first in zip(shape, told, trunk, strict=True) if own == first == _SAME)
