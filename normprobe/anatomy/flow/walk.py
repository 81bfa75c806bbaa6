"""Walks along a flow: back through light steps, back in order of time, forward to the first steps of interest."""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from normprobe.anatomy.flow.levels import Level
from normprobe.anatomy.flow.ops import ACCUMULATING, LIGHT, MAXIMA, REST, Role, base
from normprobe.anatomy.flow.steps import Flow, Step
from normprobe.capture.trace import Ref


@dataclass(frozen=True, slots=True)
class Link:
    """A value on a light chain and the scale steps from it to the chain's start (None: it is no multiple of it)."""

    value: int
    scales: tuple[Step, ...] | None = ()

    def factor(self, flow: Flow) -> float | None:
        """The constant factor from the value to the chain's start; None where it is not constant."""
        factors = [None] if self.scales is None else [constant_factor(flow, step) for step in self.scales]
        known = [f for f in factors if f is not None]
        return math.prod(known, start=1.0) if len(known) == len(factors) else None


def light_chain(flow: Flow, value: int) -> Iterator[Link]:
    """`value` and the values it came from through light steps with one signal input, nearest first."""
    scales: tuple[Step, ...] = ()
    while True:
        yield Link(value, scales)
        step = flow.made_by(value)
        if step is None or step.role not in LIGHT or len(step.inputs) != 1:
            return
        if step.role is Role.SCALE:
            scales = (*scales, step)
        value = step.inputs[0]


def moves_between(flow: Flow, source: int, value: int) -> list[tuple[Step, int]] | None:
    """The moves by which `value` comes from `source`, in order, and which of its outputs each goes on from; other light
    steps apart. None where it comes by another way."""
    found = []
    while value != source:
        step = flow.made_by(value)
        if step is None or step.role not in LIGHT or len(step.inputs) != 1:
            return None
        if step.role is Role.MOVE:
            found.append((step, step.outputs.index(value)))
        value = step.inputs[0]
    return found[::-1]


def origin(flow: Flow, value: int) -> int:
    """The id of the step from which a value comes by light steps; -1 for an input of the model."""
    *_, last = light_chain(flow, value)
    return flow.producer.get(last.value, -1)


def constant_factor(flow: Flow, step: Step, learned: Callable[[int], float | None] | None = None) -> float | None:
    """The number that a scale step multiplies by, zeros of a mask apart; None where it is not one number, or depends on
    parameters and `learned`, which tells the number that such a value is now, is not given. The scales of
    a weight that is kept in integers are part of the weight."""
    name = base(step.node.op)
    if name.startswith("aten.neg"):
        return -1.0
    if name.startswith("aten.add") and not step.statics:  # x + x
        return 2.0
    numbers = [float(a) for a in step.node.args if isinstance(a, (int, float)) and not isinstance(a, bool)]
    for value in step.statics:
        number = flow.statics.number if not flow.levels.parameters(value) else learned
        known = number(value) if number is not None and flow.levels.of[value] is Level.STATIC else None
        if known is None:
            return 1.0 if _widens(flow, step) else None
        numbers.append(known)
    if len(numbers) != 1:
        return None
    if not name.startswith("aten.div"):
        return 1.0 - numbers[0] if name == REST else numbers[0]
    return 1.0 / numbers[0] if numbers[0] else None


def _widens(flow: Flow, step: Step) -> bool:
    """Whether a step multiplies a product with integer weights by their scales."""
    value = step.inputs[0]
    while (maker := flow.made_by(value)) is not None and maker.role is Role.MOVE and len(maker.inputs) == 1:
        value = maker.inputs[0]
    return maker is not None and maker.role is Role.MATMUL and any(_integers(flow, v) for v in maker.statics)


def _integers(flow: Flow, value: int) -> bool:
    """Whether a static value comes from integers of the model by views and casts."""
    while len((node := flow.trace.producer(value)).inputs) == 1:
        value = node.inputs[0]
    dtype = flow.trace.values[value].dtype
    return node.op in ("parameter", "buffer") and not dtype.is_floating_point and not dtype.is_complex


def pools(step: Step) -> bool:
    """Whether a step draws neighbours together into their mean, sum or maximum."""
    return step.role is Role.POOL or (step.role is Role.REDUCE and base(step.node.op) in MAXIMA)


def operand_factor(step: Step, value: int) -> float:
    """The constant by which an add multiplies its operand `value` (`alpha`, `beta`, and the sign of a difference)."""
    alpha = step.node.kwargs.get("alpha", 1)
    second = argument_value(step.node.args[1]) == value if len(step.node.args) > 1 else False
    name = base(step.node.op)
    if step.node.op == "aten.lerp.Scalar":  # lerp(a, b, w) is (1 − w)·a + w·b
        weight = float(step.node.args[2])
        return weight if second else 1.0 - weight
    if name in ACCUMULATING:  # addmm(x, a, b) is beta·x + alpha·a@b
        return float(step.node.kwargs.get("beta", 1) if argument_value(step.node.args[0]) == value else alpha)
    if name == "aten.rsub":  # rsub(a, b) is b − alpha·a
        return 1.0 if second else -float(alpha)
    if not second or name.rstrip("_") not in ("aten.add", "aten.sub"):
        return 1.0
    return -float(alpha) if name.startswith("aten.sub") else float(alpha)


def backward(flow: Flow, value: int, stop: Callable[[Step | None, int], bool]) -> Iterator[tuple[int, Step | None]]:
    """Values that `value` was computed from and their makers, latest first; values for which `stop` holds are not
    yielded nor looked behind. Each value comes once."""
    heap, seen = [(-flow.producer.get(value, -1), value)], {value}
    while heap:
        _, current = heapq.heappop(heap)
        step = flow.made_by(current)
        if stop(step, current):
            continue
        yield current, step
        for source in step.inputs if step is not None else ():
            if source not in seen:
                seen.add(source)
                heapq.heappush(heap, (-flow.producer.get(source, -1), source))


def first_readers(
    flow: Flow,
    value: int,
    within: frozenset[int] | None,
    through: frozenset[Role],
    also: frozenset[int] = frozenset(),
) -> list[Step]:
    """The first steps on every way forward from `value` whose role is not in `through`, in order of time.

    Args:
        flow: the flow.
        value: where to start.
        within: only steps with these ids are looked at; None for all.
        through: roles of steps that are passed.
        also: ids of other steps that are passed.
    """
    hits: dict[int, Step] = {}
    todo, seen = [value], {value}
    while todo:
        for step in flow.readers(todo.pop()):
            if within is not None and step.id not in within:
                continue
            if step.role not in through and step.id not in also:
                hits[step.id] = step
                continue
            fresh = [v for v in step.outputs if v not in seen]
            seen.update(fresh)
            todo += fresh
    return [hits[i] for i in sorted(hits)]


def reached(flow: Flow, value: int, through: frozenset[Role]) -> set[int]:
    """`value` and everything made from it by steps whose roles are in `through`."""
    found, todo = {value}, [value]
    while todo:
        for step in flow.readers(todo.pop()):
            if step.role in through:
                fresh = [v for v in step.outputs if v not in found]
                found.update(fresh)
                todo += fresh
    return found


def last_makers(flow: Flow, value: int, within: frozenset[int], through: frozenset[Role]) -> list[Step]:
    """The last steps before `value` on every way back inside `within` whose role is not in `through`."""
    hits: dict[int, Step] = {}
    todo, seen = [value], {value}
    while todo:
        step = flow.made_by(todo.pop())
        if step is None or step.id not in within:
            continue
        if step.role not in through:
            hits[step.id] = step
            continue
        fresh = [v for v in step.inputs if v not in seen]
        seen.update(fresh)
        todo += fresh
    return [hits[i] for i in sorted(hits)]


def argument_value(argument: object) -> int | None:
    """The value behind a recorded argument, None if it is no tensor."""
    return argument.value if isinstance(argument, Ref) else None
