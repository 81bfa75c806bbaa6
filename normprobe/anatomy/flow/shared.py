"""Whether the places along an axis of one value are those along an axis of another one.

Both are followed back to a value that they have in common; its axes are counted and sent forward on both ways, through
products too, which make features anew and leave the other axes as they are.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from normprobe.anatomy.flow.along import changes, followed, moved
from normprobe.anatomy.flow.ops import Role
from normprobe.anatomy.flow.replay import condensed, counted
from normprobe.anatomy.flow.steps import Flow, Step
from normprobe.anatomy.flow.walk import argument_value

_FARTHEST = 4096  # steps back
_MAKES = frozenset({Role.MATMUL, Role.ATTENTION})
_ENDS = frozenset({Role.SOURCE, Role.HEAVY, Role.REDUCE, Role.POOL})

Axes = tuple[int, Sequence[int]]  # a value and some of its axes
_Way = list[tuple[Step, int, int]]  # steps in order of time, with the input that is followed and what they make of it


def share_places(flow: Flow, first: Axes, second: Axes) -> bool | None:
    """Whether an axis of the value that both come from runs along one of the axes of each; None where that cannot be
    told."""
    ways = _ways(flow, first[0], second[0])
    if ways is None:
        return None
    start, *both = ways
    unknown = False
    for axis in range(len(flow.shape(start))):
        sent = [_sent(flow, way, counted(flow.shape(start), axis)) for way in both]
        runs = [
            None if numbers is None else any(changes((numbers,), i) for i in axes)
            for numbers, (_, axes) in zip(sent, (first, second), strict=True)
        ]
        if all(runs):
            return True
        unknown = unknown or (None in runs and False not in runs)
    return None if unknown else False


def _ways(flow: Flow, first: int, second: int) -> tuple[int, _Way, _Way] | None:
    """The latest value that both come from, and the ways from there; None where there is none."""
    passed = _back(flow, first)
    places = {value: i for i, (_, value, _) in enumerate(passed)} | {first: -1}
    if second in places:
        return second, passed[: places[second] + 1][::-1], []
    other = _back(flow, second)
    for i, (_, value, _) in enumerate(other):
        if value in places:
            return value, passed[: places[value] + 1][::-1], other[: i + 1][::-1]
    return None


def _back(flow: Flow, value: int) -> _Way:
    """The steps back from a value as far as its axes can be followed, nearest first."""
    way: _Way = []
    while len(way) < _FARTHEST and (step := flow.made_by(value)) is not None:
        before = _before(flow, step, value)
        if before is None:
            break
        way.append((step, before, value))
        value = before
    return way


def _before(flow: Flow, step: Step, value: int) -> int | None:
    """The input whose axes `value` has: the query of attention, the first factor of a product, the earliest of what is
    added, which is the trunk."""
    if step.role in _ENDS or not step.inputs:
        return None
    if step.role in _MAKES:
        return step.inputs[0] if _made(flow, step, step.inputs[0], value) is not None else None
    alike = [v for v in step.inputs if flow.shape(v) == flow.shape(value)]
    if step.role in (Role.ADD, Role.GATE) and alike:
        return min(alike, key=lambda v: flow.producer.get(v, -1))
    return followed(flow, step, value)


def _made(flow: Flow, step: Step, source: int, value: int) -> int | None:
    """The axis of a factor in whose place a product or attention makes new features; None where other axes change."""
    old, new = flow.shape(source), flow.shape(value)
    if len(old) != len(new) or len(old) < 2:
        return None
    axis = len(old) - 1
    if step.role is Role.MATMUL and "convolution" in step.node.op:
        axis = 1
    elif step.role is Role.MATMUL and _second(step, source):
        axis = len(old) - 2
    return axis if all(a == b for i, (a, b) in enumerate(zip(old, new, strict=True)) if i != axis) else None


def _second(step: Step, source: int) -> bool:
    """Whether a value is the second factor of a product, whose rows are summed over."""
    factors = [v for v in map(argument_value, step.node.args) if v is not None][-2:]
    return len(factors) == 2 and factors[1] == source != factors[0]


def _sent(flow: Flow, way: _Way, numbers: Tensor) -> Tensor | None:
    found: Tensor | None = numbers
    for step, source, value in way:
        if found is None:
            return None
        if step.role in _MAKES:
            axis = _made(flow, step, source, value)
            found = None if axis is None else condensed(found).narrow(axis, 0, 1).expand(flow.shape(value))
        else:
            found = moved(flow, step, found, value)
    return found
