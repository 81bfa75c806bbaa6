"""The steps between the trunk and a write, and which of them carry the signal rather than a factor on it."""

from __future__ import annotations

import math
from collections.abc import Container, Iterable
from dataclasses import dataclass

from normprobe.anatomy.flow.ops import PRODUCTS, WEIGHTY, Role, base
from normprobe.anatomy.flow.steps import Flow, Step
from normprobe.anatomy.flow.walk import light_chain

_BENDING = frozenset({Role.ACT, Role.GATE, Role.SOFTMAX, Role.ATTENTION, Role.HEAVY})
_BOUNDED = frozenset(f"aten.{n}" for n in ("sigmoid", "sigmoid_", "hardsigmoid", "hardsigmoid_"))


@dataclass(frozen=True)
class Part:
    """One way from the trunk to a write.

    Attributes:
        end: the value in which it ends.
        region: all its steps.
        core: those that carry the signal; a gate or a router only makes a factor on it or a choice.
    """

    end: int
    region: frozenset[int]
    core: frozenset[int]


def make_part(flow: Flow, source: int, end: int, region: frozenset[int], gates: bool = False) -> Part:
    """The way from `source` to `end` over the steps `region`. With `gates` a product of the trunk itself with a gate,
    met on this way, is another state of the trunk and carries nothing of the branch (the reset gate of a GRU)."""
    visited: set[int] = set()
    todo = [end]
    while todo:
        step = flow.made_by(todo.pop())
        if step is None or step.id not in region or step.id in visited:
            continue
        factor = control(flow, step, source, region)
        if gates and factor is not None and source in (k.value for v in step.inputs for k in light_chain(flow, v)):
            continue
        visited.add(step.id)
        todo += [v for v in step.inputs if v not in (source, factor) and flow.floating(v)]
    core = between(flow, source, visited)
    return Part(end, region, core if any(flow.steps[i].role in WEIGHTY for i in core) else region)


def control(flow: Flow, step: Step, source: int, region: frozenset[int]) -> int | None:
    """The operand of a product that only scales the other one: it comes from outside the branch, holds one number for
    many elements, or is bounded by a sigmoid. None where there is no such operand."""
    if step.role is not Role.GATE or len(step.inputs) != 2:
        return None
    outside = [v for v in step.inputs if enters(flow, v, source, region)]
    return outside[0] if len(outside) == 1 else steering(flow, step)


def steering(flow: Flow, step: Step) -> int | None:
    """The operand of a product that holds one number for many elements of the other, or alone is made by a sigmoid."""
    if step.role is not Role.GATE or len(step.inputs) != 2 or base(step.node.op) not in PRODUCTS:
        return None
    small, large = sorted(step.inputs, key=lambda v: math.prod(flow.shape(v)))
    if math.prod(flow.shape(small)) < math.prod(flow.shape(large)):
        return small
    gates = [v for v in step.inputs if by_sigmoid(flow, v)]
    return gates[0] if len(gates) == 1 else None


def by_sigmoid(flow: Flow, value: int) -> bool:
    """Whether a value comes from a sigmoid by light steps."""
    return _sigmoid(flow, value) is not None


def gate_of(flow: Flow, value: int) -> int | None:
    """The sigmoid or softmax whose output is the factor on a value, light steps behind it apart; None where there is
    none."""
    *_, last = light_chain(flow, value)
    step = flow.made_by(last.value)
    factor = steering(flow, step) if step is not None else None
    return None if factor is None else _sigmoid(flow, factor, softmax=True)


def _sigmoid(flow: Flow, value: int, softmax: bool = False) -> int | None:
    *_, last = light_chain(flow, value)
    maker = flow.made_by(last.value)
    if maker is None or not (base(maker.node.op) in _BOUNDED or (softmax and maker.role is Role.SOFTMAX)):
        return None
    return maker.id


def heavy(flow: Flow, region: frozenset[int]) -> frozenset[int]:
    """The steps of a region that do more than to move or scale a signal."""
    return frozenset(i for i in region if flow.steps[i].role in WEIGHTY)


def bends(flow: Flow, region: frozenset[int]) -> bool:
    """Whether a region is not linear in the signal, norms apart."""
    steps = [flow.steps[i] for i in region]
    products = any(s.role is Role.MATMUL and len(s.inputs) > 1 for s in steps)
    return products or any(s.role in _BENDING for s in steps)


def enters(flow: Flow, value: int, source: int, region: frozenset[int]) -> bool:
    """Whether a value that a branch uses was not computed from what it reads."""
    return value != source and flow.producer.get(value, -1) not in region


def between(flow: Flow, source: int, visited: Iterable[int]) -> frozenset[int]:
    """Those of the visited steps that were computed from `source`."""
    live, region = {source}, set()
    for index in sorted(set(visited)):
        step = flow.steps[index]
        if not live.isdisjoint(step.inputs):
            live.update(step.outputs)
            region.add(index)
    return frozenset(region)


def region_to(flow: Flow, source: int, end: int, within: Container[int]) -> frozenset[int]:
    """The steps of `within` on ways from `source` to `end`."""
    todo = [end]
    visited: set[int] = set()
    while todo:
        step = flow.made_by(todo.pop())
        if step is None or step.id not in within or step.id in visited:
            continue
        visited.add(step.id)
        todo += [v for v in step.inputs if v != source]
    return between(flow, source, visited)
