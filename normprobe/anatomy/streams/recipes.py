"""What a branch does besides the norms around it: its inner norms, and whether it does the same as another one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from normprobe.anatomy.flow.ops import Role
from normprobe.anatomy.flow.steps import Flow
from normprobe.anatomy.streams.parts import Part, region_to
from normprobe.anatomy.streams.placement import Norms
from normprobe.records import NormSite
from normprobe.records.anatomy import BranchKind

_SIZING = frozenset({"layernorm", "rmsnorm", "l2norm", "scalenorm", "groupnorm", "instancenorm"})


def inner_norms(flow: Flow, part: Part, around: Norms, norms: Sequence[NormSite]) -> tuple[str, ...]:
    """The norms in a branch that are neither before it nor behind it, in order of execution."""
    outer = {step.id for step in (*around.before, *around.behind)}
    steps = (flow.steps[i] for i in sorted(part.region - outer) if flow.steps[i].role is Role.NORM)
    return tuple(dict.fromkeys(norms[step.group.norm].path for step in steps if step.group is not None))


def normed_inside(flow: Flow, source: int, part: Part, norms: Sequence[NormSite]) -> bool:
    """Whether every way of the signal from `source` through a branch passes a norm that sets its size for each sample
    alone."""
    sizing = {
        step.id
        for step in (flow.steps[i] for i in part.region)
        if step.group is not None and step.role is Role.NORM and norms[step.group.norm].kind in _SIZING
    }
    return bool(sizing) and flow.producer.get(part.end) not in region_to(flow, source, part.end, part.core - sizing)


def recipes(flow: Flow, branches: Iterable[tuple[BranchKind, Part]]) -> list[int]:
    """For each branch the number of its kind and operations, norms and moves left out: the same for those of one kind
    that run the same ones as often."""
    numbers: dict[tuple[BranchKind, frozenset[tuple[str, int]]], int] = {}
    found = []
    for kind, part in branches:
        steps = (flow.steps[i] for i in part.region)
        counts = Counter(step.node.op for step in steps if step.role not in (Role.MOVE, Role.NORM))
        found.append(numbers.setdefault((kind, frozenset(counts.items())), len(numbers)))
    return found
