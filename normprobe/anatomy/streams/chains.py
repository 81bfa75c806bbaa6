"""Residual streams as chains of writes; skips inside a branch are no streams."""

from __future__ import annotations

from normprobe.anatomy.flow.steps import Flow
from normprobe.anatomy.streams.adds import Write, previous_write


def find_chains(flow: Flow, writes: dict[int, Write]) -> list[list[Write]]:
    """The outermost chains of writes, in order of their first write.

    Writes form a forest by `previous_write`. The longest path becomes a chain first; what then lies inside one of its
    branches, or holds an accepted chain inside one of its own branches, is an inner skip and left out, and so is a
    chain without any weights. A write whose branch holds consecutive writes is a long skip around a stream (of a
    pyramid, a U-Net, a group of blocks), no part of one.
    """
    writes = {i: write for i, write in writes.items() if not _spans(flow, write, writes)}
    accepted: list[list[Write]] = []
    taken: set[int] = set()
    inside: set[int] = set()
    for chain in sorted(_paths(flow, writes), key=len, reverse=True):
        steps = {w.step.id for w in chain}
        regions = frozenset[int]().union(*(w.whole.region for w in chain))
        if steps & inside or regions & taken or not any(_weights(flow, w) for w in chain):
            continue
        accepted.append(chain)
        taken |= steps
        inside |= regions
    return sorted(accepted, key=lambda chain: chain[0].step.id)


def _spans(flow: Flow, write: Write, writes: dict[int, Write]) -> bool:
    """Whether two consecutive writes with weights lie inside the branch of `write`."""
    inside = {i for i in write.whole.region & writes.keys() if _weights(flow, writes[i])}
    before = (previous_write(flow, writes[i], writes) for i in sorted(inside))
    return any(earlier is not None and earlier.step.id in inside for earlier in before)


def _weights(flow: Flow, write: Write) -> bool:
    return any(flow.steps[i].parameters for i in write.whole.region)


def _paths(flow: Flow, writes: dict[int, Write]) -> list[list[Write]]:
    """Disjoint paths through the forest of writes, the longest way first at every fork; of equally long ways the one
    that ends last, as the others may end inside its branch."""
    previous = {i: previous_write(flow, w, writes) for i, w in writes.items()}
    length = {i: 0 for i in writes}
    for i, before in previous.items():  # in order of time, so that `before` is done
        length[i] = 1 + (length[before.step.id] if before is not None else 0)
    used: set[int] = set()
    paths = []
    for end in sorted(writes, key=lambda i: (-length[i], -i)):
        path: list[Write] = []
        current: Write | None = writes[end]
        while current is not None and current.step.id not in used:
            used.add(current.step.id)
            path.append(current)
            current = previous[current.step.id]
        if path:
            paths.append(path[::-1])
    return paths
