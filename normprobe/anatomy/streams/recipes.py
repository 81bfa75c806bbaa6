"""What a branch does besides the norms around it: its inner norms, and whether it does the same as another one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from normprobe.anatomy.flow.ops import Role
from normprobe.anatomy.flow.steps import Flow
from normprobe.anatomy.streams.parts import Part
from normprobe.anatomy.streams.placement import Norms
from normprobe.records import NormSite


def inner_norms(flow: Flow, part: Part, around: Norms, norms: Sequence[NormSite]) -> tuple[str, ...]:
    """The norms in a branch that are neither before it nor behind it, in order of execution."""
    outer = {step.id for step in (*around.before, *around.behind)}
    steps = (flow.steps[i] for i in sorted(part.region - outer) if flow.steps[i].role is Role.NORM)
    return tuple(dict.fromkeys(norms[step.group.norm].path for step in steps if step.group is not None))


def recipes(flow: Flow, parts: Iterable[Part]) -> list[int]:
    """For each branch the number of its operations, norms and moves left out: the same for those that run the same
    ones as often."""
    numbers: dict[frozenset[tuple[str, int]], int] = {}
    found = []
    for part in parts:
        steps = (flow.steps[i] for i in part.region)
        counts = Counter(step.node.op for step in steps if step.role not in (Role.MOVE, Role.NORM))
        found.append(numbers.setdefault(frozenset(counts.items()), len(numbers)))
    return found
