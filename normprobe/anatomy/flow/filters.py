"""Filters on a trunk: a sum from which the mean over its neighbours is taken off, as decompositions of a series do."""

from __future__ import annotations

from dataclasses import replace

from normprobe.anatomy.flow.ops import DETRENDED, LIGHT, Role, base, slides
from normprobe.anatomy.flow.steps import Flow, Step, ref

_FARTHEST = 32  # steps back from a sliding mean


def settle_filters(flow: Flow) -> None:
    """Make x less a sliding mean of x one step on x, where x is a sum that nothing else reads: what is left of it is
    the trunk. Elsewhere (on what a branch reads) it stays the sum of two signals that it is, and mixes neighbours."""
    for step in flow.steps:
        if step.role is not Role.ADD or base(step.node.op).rstrip("_") != "aten.sub":
            continue
        value, mean = (ref(a) for a in step.node.args[:2])
        sliding = _sliding(flow, value, mean)
        if sliding and _summed(flow, value, sliding | {step.id}):
            step.role, step.inputs = Role.SCALE, (value,)
            step.node = replace(step.node, op=DETRENDED, inputs=(value,), args=())
            flow.consumers[mean].remove(step.id)


def _sliding(flow: Flow, value: int, mean: int) -> frozenset[int]:
    """The steps by which `mean` is made as a sliding mean of `value`, by moves alone else; none where it is not."""
    todo, found = [mean], dict[int, Step]()
    while todo:
        current = todo.pop()
        step = flow.made_by(current)
        if current == value or (step is not None and step.id in found):
            continue
        if step is None or len(found) > _FARTHEST or not (step.role is Role.MOVE or slides(step.node)):
            return frozenset()
        found[step.id] = step
        todo += step.inputs
    return frozenset(found) if any(slides(step.node) for step in found.values()) else frozenset()


def _summed(flow: Flow, value: int, reading: frozenset[int]) -> bool:
    """Whether `value` is a sum of two signals, normed perhaps, that only the steps `reading` go on from."""
    while (step := flow.made_by(value)) is not None and {reader.id for reader in flow.readers(value)} <= reading:
        if step.role is Role.ADD:
            return True
        if len(step.inputs) != 1 or (step.role is not Role.NORM and step.role not in LIGHT):
            return False
        value, reading = step.inputs[0], frozenset({step.id})
    return False
