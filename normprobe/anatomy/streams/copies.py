"""Trunks that are kept in several parallel copies, and the products that mix them."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch

from normprobe.anatomy.flow.along import along, axes, origin
from normprobe.anatomy.flow.ops import Role, base
from normprobe.anatomy.flow.replay import condensed, counted, sent
from normprobe.anatomy.flow.steps import Flow, Step
from normprobe.anatomy.flow.walk import argument_value, light_chain, moves_between

MOST_COPIES = 16


def mixed(flow: Flow, step: Step) -> int | None:
    """The operand of a product that only mixes the few parallel copies held on one of its axes: no feature and no token
    meets another. None where the step is no such product."""
    found = _mixed(flow, step)
    return None if found is None else found[0]


def _mixed(flow: Flow, step: Step) -> tuple[int, int] | None:
    """The operand of a product that only mixes copies, and their axis in it and in what is made."""
    if base(step.node.op) not in ("aten.bmm", "aten.mm"):
        return None
    key = "mixed", step.id
    if key not in flow.memo:
        flow.memo[key] = _held_apart(flow, step)
    found: tuple[int, int] | None = flow.memo[key]
    return found


def _held_apart(flow: Flow, step: Step) -> tuple[int, int] | None:
    left, right = (argument_value(a) for a in step.node.args[:2])
    for copies, weights, axis in ((right, left, -2), (left, right, -1)):
        if copies is None or weights is None or copies not in step.inputs or copies == weights:
            continue
        sizes, copied = flow.shape(weights), flow.shape(copies)[axis]
        fresh = sizes[-2] if axis == -2 else sizes[-1]
        few = 1 < copied <= MOST_COPIES and fresh <= 2 * copied
        if few and math.prod(sizes) < math.prod(flow.shape(copies)) and _copied(flow, copies, axis):
            return copies, axis
    return None


def copies(flow: Flow, step: Step) -> int:
    """How many copies a mixing product mixes."""
    weights = argument_value(step.node.args[0])
    return flow.shape(weights)[-1] if weights is not None else 1


def _copied(flow: Flow, value: int, axis: int) -> bool:
    """Whether an axis holds copies: neither features nor places (tokens) run along it, or the copies that an earlier
    product mixed, or states of a trunk are stacked there."""
    start = origin(flow, value)
    step = None if start is None else flow.made_by(start)
    before = None if step is None else _mixed(flow, step)
    if start is not None and before is not None:
        told = axes(flow, value, {start: before[1] % len(flow.shape(start))})
        return told is not None and not told[axis].places
    runs = along(flow, value, axis)
    return latest_stacked(flow, value) != value if runs is None else not (runs.features or runs.places)


def mixing(flow: Flow, region: frozenset[int]) -> frozenset[int]:
    """The steps of a branch that only mix parallel copies, as it reads several streams as one."""
    found = {i: mixed(flow, flow.steps[i]) for i in region if flow.steps[i].role is Role.MATMUL}
    return frozenset(i for i, value in found.items() if value is not None and _gathers(flow, flow.steps[i], value))


def _gathers(flow: Flow, step: Step, value: int) -> bool:
    return math.prod(flow.shape(step.outputs[0])) < math.prod(flow.shape(value))


def apart(flow: Flow, source: int, side: int, core: frozenset[int]) -> bool:
    """Whether a branch reads only such of the few parallel copies held in `source` as the trunk, which comes as `side`,
    does not pass on: what it adds is another copy, and no write."""
    shape = flow.shape(source)
    entries = [(s, i) for s in map(flow.steps.__getitem__, core) if source in s.inputs for i in range(len(s.outputs))]
    if not entries or any(step.role is not Role.MOVE for step, _ in entries):
        return False
    trunk = moves_between(flow, source, side) or []
    for axis in (i for i, size in enumerate(shape[:-1]) if trunk and 1 < size <= MOST_COPIES):
        told = along(flow, source, axis)
        if told is not None and (told.places or told.features):
            continue
        index = counted(shape, axis)
        passed = _picked(flow, index, trunk)
        read = [_picked(flow, index, [entry]) for entry in entries]
        if passed is not None and None not in read and passed.isdisjoint(set[int]().union(*(r or set() for r in read))):
            return True
    return False


def _picked(flow: Flow, index: torch.Tensor, moves: Iterable[tuple[Step, int]]) -> set[int] | None:
    """The numbers of `index` that moves leave; None where they cannot be followed."""
    left = sent(flow, [(step.node, place) for step, place in moves], index)
    return None if left is None else set(torch.unique(condensed(left)).tolist())


def latest_stacked(flow: Flow, value: int) -> int:
    """The last of the states that a mixture over depth was stacked from; `value` itself where it is no stack."""
    *_, link = light_chain(flow, value)
    maker = flow.made_by(link.value)
    if maker is None or base(maker.node.op) != "aten.stack":
        return value
    return max(maker.inputs, key=lambda v: flow.producer.get(v, -1))
