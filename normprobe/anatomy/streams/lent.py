"""What branches take from earlier branches of their stream by another way than the stream: keys and values that several
layers share, the state that a router hands to the next one."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby

from normprobe.anatomy.flow.steps import Flow, Step
from normprobe.anatomy.streams.parts import Part, enters
from normprobe.anatomy.streams.writes import Write

Reads = Mapping[int, tuple[str, ...]]  # parameters that read the stream, by the id of their step


def lent(flow: Flow, branches: Sequence[tuple[Write, Part]], reads: Sequence[Reads]) -> list[tuple[str, ...]]:
    """For each branch the parameters that read the stream for it inside earlier branches.

    Args:
        flow: the flow.
        branches: in order of execution.
        reads: of each branch, the steps that read the stream into it.
    """
    first = flow.producer.get(branches[0][0].source, -1)
    ends = {write.step.id for write, _ in branches}
    known: dict[int, tuple[str, ...]] = {}
    found = []
    for _, beside in groupby(zip(branches, reads, strict=True), lambda one: one[0][0].step.id):
        group = list(beside)  # branches that meet before one add take nothing from each other
        for (write, part), _ in group:
            taken: list[str] = []
            for value in _entering(flow, write, part, first) if known else ():
                taken += [p for step in _behind(flow, value, first, ends, known) for p in known.get(step.id, ())]
            found.append(tuple(dict.fromkeys(taken)))
        for _, own in group:
            known.update(own)
    return found


def _entering(flow: Flow, write: Write, part: Part, first: int) -> Iterator[int]:
    """Signals made since the stream began that a branch uses and did not compute from its own read."""
    inputs = dict.fromkeys(v for i in part.region for v in flow.steps[i].inputs)
    for value in inputs:
        if flow.producer.get(value, -1) > first and enters(flow, value, write.source, part.region):
            yield value


def _behind(flow: Flow, value: int, first: int, ends: set[int], known: Reads) -> Iterator[Step]:
    """The steps behind a value down to those that read the stream, and not past the stream itself."""
    todo, seen = [value], {value}
    while todo:
        step = flow.made_by(todo.pop())
        if step is None or step.id <= first or step.id in ends:
            continue
        yield step
        if step.id not in known:
            fresh = [v for v in step.inputs if v not in seen]
            seen.update(fresh)
            todo += fresh
