"""Norms that stand right behind another norm."""

from __future__ import annotations

from collections.abc import Sequence

from normprobe.anatomy.flow.ops import LIGHT, Role
from normprobe.anatomy.flow.steps import Flow, Step
from normprobe.anatomy.flow.walk import constant_factor, first_readers, light_chain, reached
from normprobe.records import NormSite


def with_followed(norms: Sequence[NormSite], flow: Flow) -> list[NormSite]:
    """The norm sites, each with the norm that it follows in every one of its executions (itself, called twice)."""
    found: dict[int, set[int | None]] = {}
    for step in flow.steps:
        if step.role is Role.NORM and step.group is not None:
            found.setdefault(step.group.norm, set()).add(_followed(flow, step))
    rows = []
    for index, norm in enumerate(norms):
        one = found.get(index, set())
        earlier = index if one == {None, index} else one.pop() if len(one) == 1 else None  # called twice, or another
        first = norms[earlier] if earlier is not None else None
        alike = first is not None and _of_the_same(first, norm)
        rows.append(norm.model_copy(update={"follows": first.path}) if first is not None and alike else norm)
    return rows


def _followed(flow: Flow, norm: Step) -> int | None:
    """The site of the norm whose output `norm` reads, by moves and constant factors, as the only one that does."""
    *_, last = light_chain(flow, norm.inputs[0])
    earlier = flow.made_by(last.value)
    if earlier is None or earlier.role is not Role.NORM or earlier.group is None or not _plain(flow, norm.inputs[0]):
        return None
    light = reached(flow, last.value, LIGHT)
    alone = first_readers(flow, last.value, None, LIGHT) == [norm] and light.isdisjoint(flow.outputs)
    return earlier.group.norm if alone else None


def _plain(flow: Flow, value: int) -> bool:
    """Whether a value is made from the last norm before it by moves and constant factors alone."""
    while (step := flow.made_by(value)) is not None and step.role in LIGHT:
        if step.role is Role.SHIFT or (step.role is Role.SCALE and constant_factor(flow, step) is None):
            return False
        value = step.inputs[0]
    return True


def _of_the_same(first: NormSite, second: NormSite) -> bool:
    """Whether two norms take their statistics of the same elements."""
    known = first.size is not None and first.axes != ()
    return known and (first.size, first.axes, first.groups) == (second.size, second.axes, second.groups)
