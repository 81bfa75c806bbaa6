"""Residual streams as chains of writes; skips inside a branch are no streams."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

from normprobe.anatomy.flow.ops import WEIGHTY, Role
from normprobe.anatomy.flow.steps import Flow
from normprobe.anatomy.flow.walk import last_makers, reached
from normprobe.anatomy.streams.parts import bends, region_to
from normprobe.anatomy.streams.trunks import previous
from normprobe.anatomy.streams.writes import Trunks, Write

_LIGHTER = frozenset(Role) - WEIGHTY
_BETWEEN = _LIGHTER - {Role.POOL, Role.REDUCE}


def find_chains(flow: Flow, trunks: Trunks) -> tuple[list[list[Write]], list[list[Write]]]:
    """The outermost chains of writes, in order of their first write, and the chains of long skips.

    Writes form a forest by `previous`. The longest path becomes a chain first; what then lies inside one of its
    branches, or holds an accepted chain inside one of its own branches, is an inner skip and left out, and so is a
    chain without any weights. A write whose branch holds consecutive writes is a long skip around a stream (of a
    pyramid, a U-Net, a group of blocks), no part of one.
    """
    after = _consecutive(flow, trunks)
    spanning = {i: write for i, write in trunks.writes.items() if _spans(write, after)}
    around = replace(trunks, writes=spanning)
    trunks = replace(trunks, writes={i: write for i, write in trunks.writes.items() if i not in spanning})
    accepted: list[list[Write]] = []
    taken: set[int] = set()
    inside: set[int] = set()
    for chain in sorted(_paths(flow, trunks), key=len, reverse=True):
        steps = {w.step.id for w in chain}
        regions = frozenset[int]().union(*(w.whole.region for w in chain))
        if steps & inside or regions & taken or _recurs(flow, chain) or not any(_weights(flow, w) for w in chain):
            continue
        accepted.append(chain)
        taken |= steps
        inside |= regions
    return sorted(accepted, key=lambda chain: chain[0].step.id), _paths(flow, around)


def linked(flow: Flow, one: list[Write], other: list[Write]) -> bool:
    """Whether one of two chains goes on from the end of the other without weights in between: pieces of one trunk."""
    ends = [(a[-1].output, b[0]) for a, b in ((one, other), (other, one)) if a is not b]
    return any(not {b.source, b.trunk_input}.isdisjoint(reached(flow, end, _BETWEEN)) for end, b in ends)


def parted(flow: Flow, one: list[Write], other: list[Write]) -> tuple[str, ...]:
    """The parameters of the last weights between the end of a chain and the start of another one that is made from it
    by weights alone: nothing of the trunk goes along them. Empty where something does, where nothing is made from it,
    or where the two hold another number of elements, as no skip would fit."""
    start = other[0].source
    if math.prod(flow.shape(one[-1].output)) != math.prod(flow.shape(start)):
        return ()
    states = {v for w in one for v in (w.source, w.trunk_input, w.output)}
    if any(start in reached(flow, state, _LIGHTER) for state in states):
        return ()
    way = frozenset(range(one[-1].step.id + 1, flow.producer.get(start, -1) + 1))
    region = region_to(flow, one[-1].output, start, way)
    last = last_makers(flow, start, region, _LIGHTER) if flow.producer.get(start) in region else []
    return tuple(dict.fromkeys(p for step in last for p in step.parameters))


def _consecutive(flow: Flow, trunks: Trunks) -> dict[int, int]:
    """The writes with weights that follow another one with weights, and that one; linear ones could be one matrix, and
    a cell that is run again goes along the tokens."""
    bent = {i: w for i, w in trunks.writes.items() if _weights(flow, w) and bends(flow, w.whole.region)}
    before = {i: previous(flow, w, trunks) for i, w in bent.items()}
    found = {i: w for i, w in before.items() if w is not None and w.step.id in bent}
    return {i: w.step.id for i, w in found.items() if not _recurs(flow, [w, bent[i]])}


def _spans(write: Write, after: Mapping[int, int]) -> bool:
    """Whether two consecutive writes lie inside the branch of `write`."""
    return any(after[i] in write.whole.region for i in write.whole.region.intersection(after))


def _weights(flow: Flow, write: Write) -> bool:
    return any(flow.steps[i].parameters for i in write.whole.region)


def _paths(flow: Flow, trunks: Trunks) -> list[list[Write]]:
    """Disjoint paths through the forest of writes, the longest way first at every fork; of equally long ways the one
    that ends last, as the others may end inside its branch."""
    writes = trunks.writes
    before = {i: previous(flow, w, trunks) for i, w in writes.items()}
    length = {i: 0 for i in writes}
    for i, earlier in before.items():  # in order of time, so that `earlier` is done
        length[i] = 1 + (length[earlier.step.id] if earlier is not None else 0)
    used: set[int] = set()
    paths = []
    for end in sorted(writes, key=lambda i: (-length[i], -i)):
        path: list[Write] = []
        current: Write | None = writes[end]
        while current is not None and current.step.id not in used:
            used.add(current.step.id)
            path.append(current)
            current = before[current.step.id]
        if path:
            paths.append(path[::-1])
    return paths


def _recurs(flow: Flow, chain: list[Write]) -> bool:
    """Whether a chain is a cell with gates that is run again and again with the same weights: it goes along the tokens,
    not through the depth."""
    used = {frozenset(p for i in w.whole.region for p in flow.steps[i].parameters) for w in chain}
    return all(w.way == "gated" for w in chain) and len(used) == 1
