"""Where the norms of a branch sit: before it, behind it, on the sum, or nowhere."""

from __future__ import annotations

from dataclasses import dataclass

from normprobe.anatomy.flow.ops import LIGHT, WEIGHTY, Role
from normprobe.anatomy.flow.steps import Flow, Step
from normprobe.anatomy.flow.walk import first_readers, last_makers, light_chain
from normprobe.anatomy.streams.adds import Part, Write
from normprobe.records.anatomy import Placement

_OPEN = frozenset(Role) - WEIGHTY - {Role.NORM}  # everything between the trunk and the first norm or weights
_AFTER_NORM = LIGHT | {Role.POOL}  # x·sigmoid(x) written out is a gate


@dataclass(frozen=True)
class Norms:
    """The norm steps around one branch.

    Attributes:
        before: the first norms on the ways from the trunk to weights, if all ways pass one.
        behind: the norms between the last weights and the add, the last first, if all ways pass one.
        on_sum: the norms that read the add, if everything reads it through one.
        activated: whether an activation is the first thing behind `before`.
        act_on_sum: whether everything reads the add through an activation.
    """

    before: tuple[Step, ...]
    behind: tuple[Step, ...]
    on_sum: tuple[Step, ...]
    activated: bool = False
    act_on_sum: bool = False


def branch_norms(flow: Flow, write: Write, part: Part, next_source: int | None) -> Norms:
    """The norms that every way into `part`, out of it, and on from its add passes.

    Args:
        flow: the flow.
        write: the residual add.
        part: the branch.
        next_source: the value from which the next write of the stream parts; None for the last write.
    """
    before = _all_norms(first_readers(flow, write.source, part.region, _OPEN))
    readers = first_readers(flow, write.output, None, LIGHT)
    on_sum = _all_norms(readers)
    if on_sum and next_source is not None and not _leads_to(flow, on_sum[0], next_source):
        on_sum = ()
    activated = bool(before) and all(_only_activations(flow, norm, part.region) for norm in before)
    act_on_sum = bool(readers) and all(s.role is Role.ACT for s in readers)
    return Norms(before, _behind(flow, part), on_sum, activated, act_on_sum)


def _behind(flow: Flow, part: Part) -> tuple[Step, ...]:
    """The norms between the last weights and the branch's end, also those behind sums of normed parts."""
    found: list[Step] = []
    layer = _all_norms(last_makers(flow, part.end, part.region, _OPEN))
    while layer:
        found += layer
        earlier = [s for norm in layer for s in last_makers(flow, norm.inputs[0], part.region, _OPEN)]
        layer = tuple(s for s in earlier if s.role is Role.NORM and s not in found)
    return tuple(found)


def placement(norms: Norms, post: bool, skip_scale: float | None) -> Placement:
    """The field's word for the placement; `post` says whether the norm on the sum belongs to the stream."""
    if post:
        return "deepnorm" if skip_scale is None or abs(skip_scale - 1) > 1e-6 else "post"
    if norms.before and norms.behind:
        return "sandwich"
    if norms.before:
        return "preact" if norms.activated else "pre"
    if norms.behind:
        return "postact" if norms.act_on_sum else "output"
    return "none"


def _all_norms(steps: list[Step]) -> tuple[Step, ...]:
    """All of `steps` if all of them are norms, else none."""
    return tuple(steps) if all(s.role is Role.NORM for s in steps) else ()


def _leads_to(flow: Flow, norm: Step, value: int) -> bool:
    """Whether `value` is the output of `norm` or comes from it by light steps."""
    return any(link.value in norm.outputs for link in light_chain(flow, value))


def _only_activations(flow: Flow, norm: Step, region: frozenset[int]) -> bool:
    """Whether an activation is the first thing that every reader of the norm does."""
    readers = [s for v in norm.outputs for s in first_readers(flow, v, region, _AFTER_NORM)]
    return bool(readers) and all(s.role in (Role.ACT, Role.GATE) for s in readers)
