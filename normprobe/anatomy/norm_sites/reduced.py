"""What the statistic of a norm is taken over: features or places (tokens)."""

from __future__ import annotations

from collections.abc import Sequence

from normprobe.anatomy.flow.along import axes
from normprobe.anatomy.flow.ops import Role
from normprobe.anatomy.flow.steps import Flow, Step
from normprobe.records import NormSite


def with_reduced(norms: Sequence[NormSite], flow: Flow) -> list[NormSite]:
    """The norm sites, each with whether its statistic is shared by places, where all its executions agree."""
    found: dict[int, set[bool | None]] = {}
    for step in flow.steps:
        if step.role is Role.NORM and step.group is not None:
            found.setdefault(step.group.norm, set()).add(_over_places(flow, step, norms[step.group.norm]))
    told = {index: one.pop() for index, one in found.items() if len(one) == 1}
    return [norm.model_copy(update={"over_places": told.get(index)}) for index, norm in enumerate(norms)]


def _over_places(flow: Flow, step: Step, norm: NormSite) -> bool | None:
    """Whether places and no features run along one of the axes that a norm reduces; None where that cannot be told."""
    told = axes(flow, step.inputs[0]) if norm.axes else None
    if told is None or not all(-len(told) <= axis < len(told) for axis in norm.axes):
        return None
    reduced = [told[axis] for axis in norm.axes]
    if any(each.places and not each.features for each in reduced):
        return True
    return None if any(each.places for each in reduced) else False
