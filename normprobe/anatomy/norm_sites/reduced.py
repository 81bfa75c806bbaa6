"""What the statistic of a norm is taken over: features or places, and whether these are the tokens of attention."""

from __future__ import annotations

from collections.abc import Sequence

from normprobe.anatomy.flow.along import axes
from normprobe.anatomy.flow.ops import Role
from normprobe.anatomy.flow.shared import share_places
from normprobe.anatomy.flow.steps import Flow, Step
from normprobe.records import NormSite


def with_reduced(norms: Sequence[NormSite], flow: Flow, queries: Sequence[int]) -> list[NormSite]:
    """The norm sites, each with what shares its statistic, where all its executions agree.

    Args:
        norms: the sites.
        flow: the flow.
        queries: the queries of causal attention, whose tokens are the last but one axis.
    """
    found: dict[int, list[Step]] = {}
    for step in flow.steps:
        if step.role is Role.NORM and step.group is not None:
            found.setdefault(step.group.norm, []).append(step)
    return [_told(norm, flow, found.get(index, []), queries) for index, norm in enumerate(norms)]


def _told(norm: NormSite, flow: Flow, steps: Sequence[Step], queries: Sequence[int]) -> NormSite:
    places = _agreed([_over_places(flow, step, norm) for step in steps])
    tokens = _agreed([_over_tokens(flow, step, norm, queries) for step in steps]) if places else None
    return norm.model_copy(update={"over_places": places, "over_tokens": tokens})


def _agreed(told: Sequence[bool | None]) -> bool | None:
    return told[0] if len(set(told)) == 1 else None


def _over_places(flow: Flow, step: Step, norm: NormSite) -> bool | None:
    """Whether places and no features run along one of the axes that a norm reduces; None where that cannot be told."""
    told = axes(flow, step.inputs[0]) if norm.axes else None
    if told is None or not all(-len(told) <= axis < len(told) for axis in norm.axes):
        return None
    reduced = [told[axis] for axis in norm.axes]
    if any(each.places and not each.features for each in reduced):
        return True
    return None if any(each.places for each in reduced) else False


def _over_tokens(flow: Flow, step: Step, norm: NormSite, queries: Sequence[int]) -> bool | None:
    """Whether the tokens of one of these queries run along an axis that a norm reduces; None where that cannot be told
    of any."""
    told = set[bool | None]()
    for query in queries:
        told.add(share_places(flow, (step.inputs[0], norm.axes), (query, (-2,))))
        if True in told:
            return True
    return False if False in told else None
