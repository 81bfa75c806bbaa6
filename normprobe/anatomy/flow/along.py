"""What runs along an axis of a value: the features that the nearest product with weights made, or places (tokens).

Numbers of features and places are sent from that product through the recorded moves; pointwise steps keep them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from normprobe.anatomy.flow.ops import Role, base
from normprobe.anatomy.flow.replay import replay, signature
from normprobe.anatomy.flow.steps import Flow, Step
from normprobe.anatomy.flow.walk import argument_value

_FARTHEST = 64  # steps back to a product
_PRODUCTS = 4  # products of signals before the one with weights
_LARGEST = 1 << 24  # elements; larger values are not looked at

Way = tuple[int, list[tuple[Step, int]]]
Numbers = tuple[Tensor, Tensor]  # of the feature and of the place behind each element


@dataclass(frozen=True)
class Along:
    """Whether features, and whether places, change along an axis."""

    features: bool
    places: bool


def along(flow: Flow, value: int, axis: int) -> Along | None:
    """What runs along an axis of `value`; None where it cannot be told. Values that are made alike share one answer."""
    way = _way(flow, value)
    if way is None:
        return None
    start, steps = way
    moves = ((step.node, step.outputs.index(v)) for step, v in steps if step.role is Role.MOVE)
    shapes = (flow.shape(start), *(flow.shape(v) for _, v in steps))
    key = ("along", _multiplies(flow, start), _features(flow, start), shapes, signature(flow, moves), axis)
    if key not in flow.memo:
        numbers = _numbers(flow, way)
        flow.memo[key] = None if numbers is None else Along(*(_changes(n, axis) for n in numbers))
    found: Along | None = flow.memo[key]
    return found


def _changes(numbers: Tensor, axis: int) -> bool:
    """Whether numbers change along an axis, what a move put in apart."""
    before, behind = (numbers.narrow(axis, i, numbers.shape[axis] - 1) for i in (0, 1))
    return bool(((before != behind) & (before > 0) & (behind > 0)).any())


def factors(flow: Flow, product: Step) -> tuple[int, int] | None:
    """The two signals that a product multiplies; None where one of its factors is no signal."""
    values = [v for v in map(argument_value, product.node.args) if v is not None][-2:]
    return (values[0], values[1]) if len(values) == 2 and all(flow.levels.signal(v) for v in values) else None


def tokens_meet(flow: Flow, first: int, second: int, other: int = -1) -> bool:
    """Whether a product of two signals brings several places together, as it sums over them, or in pairs of a place of
    `first` (axis −2) and one of `second` (axis `other`). True where it cannot be told."""
    inner, rows, columns = along(flow, first, -1), along(flow, first, -2), along(flow, second, other)
    if inner is None or rows is None or columns is None:
        return True
    return inner.places or (rows.places and columns.places)


def _way(flow: Flow, value: int) -> Way | None:
    """The product or table that the axes of `value` come from, and the steps from there on with what they make."""
    steps: list[tuple[Step, int]] = []
    while (step := flow.made_by(value)) is not None and 0 < math.prod(flow.shape(value)) <= _LARGEST:
        if step.role in (Role.MATMUL, Role.SOURCE):
            return value, steps[::-1]
        before = _followed(flow, step, value)
        if before is None or len(steps) > _FARTHEST:
            return None
        steps.append((step, value))
        value = before
    return None


def _features(flow: Flow, start: int) -> int:
    """The axis of the features that a product or a table makes; weights that come first make rows."""
    step = flow.made_by(start)
    if step is None or step.role is not Role.MATMUL:
        return -1
    if "convolution" in step.node.op:
        return 1
    values = [v for v in map(argument_value, step.node.args) if v is not None][-2:]
    return -2 if values[0] in step.statics and len(flow.shape(start)) > 1 else -1


def _multiplies(flow: Flow, start: int) -> tuple[int, int] | None:
    """The two matrices of signals whose product `start` is; None where it is one with weights, or a table."""
    step = flow.made_by(start)
    if step is None or step.role is not Role.MATMUL or step.parameters or "convolution" in step.node.op:
        return None
    return factors(flow, step)


def _numbers(flow: Flow, way: Way, products: int = _PRODUCTS) -> Numbers | None:
    start, steps = way
    pair = _multiplies(flow, start)
    found = _fresh(flow.shape(start), _features(flow, start)) if pair is None else _crossed(flow, pair, products)
    for step, value in steps:
        moved = None if found is None else [_sent(flow, step, n, value) for n in found]
        found = None if moved is None or moved[0] is None or moved[1] is None else (moved[0], moved[1])
    return found


def _crossed(flow: Flow, pair: tuple[int, int], products: int) -> Numbers | None:
    """The numbers of a product: of the rows of its first factor with the columns of its second."""
    ways = [_way(flow, v) for v in pair]
    if products == 0 or ways[0] is None or ways[1] is None or len({flow.shape(v)[:-2] for v in pair}) > 1:
        return None
    first, second = (_numbers(flow, way, products - 1) for way in ways if way is not None)
    if first is None or second is None or min(first[0].dim(), second[0].dim()) < 2:
        return None
    rows, columns = (n[..., :1] for n in first), (n[..., :1, :] for n in second)
    features, places = (r.long() * (int(c.max()) + 1) + c for r, c in zip(rows, columns, strict=True))
    return features, places


def _fresh(shape: tuple[int, ...], axis: int) -> Numbers:
    """Features counted on one axis from 1 on, places on all others; a move may put in zeros."""
    counted = torch.arange(1, math.prod(shape) // shape[axis] + 1, dtype=torch.int32)
    places = counted.view(*(n for i, n in enumerate(shape) if i != axis % len(shape))).unsqueeze(axis)
    features = torch.arange(1, shape[axis] + 1, dtype=torch.int32).view(
        -1, *(1 for _ in shape[axis % len(shape) + 1 :])
    )
    return features.expand(shape).contiguous(), places.expand(shape).contiguous()


def _followed(flow: Flow, step: Step, value: int) -> int | None:
    """The input whose axes the output `value` has: one of its shape, the latest; else the largest of a move, or of what
    is spread over the output."""
    shape, given = flow.shape(value), [v for v in step.inputs if flow.floating(v)] or list(step.inputs)
    alike = [v for v in given if flow.shape(v) == shape]
    if alike:
        return max(alike, key=lambda v: flow.producer.get(v, -1))
    largest = max(given, key=lambda v: math.prod(flow.shape(v)))
    return largest if step.role is Role.MOVE or _spreads(flow.shape(largest), shape) else None


def _spreads(small: tuple[int, ...], large: tuple[int, ...]) -> bool:
    return len(small) <= len(large) and all(a in (1, b) for a, b in zip(small[::-1], large[::-1], strict=False))


def _sent(flow: Flow, step: Step, numbers: Tensor, value: int) -> Tensor | None:
    """The numbers of `value` from those of the input that is followed."""
    shape = flow.shape(value)
    if step.role is Role.MOVE:
        joined = base(step.node.op) == "aten.cat"
        moved = _beside(step, numbers, shape) if joined else replay(flow, step.node, numbers, step.outputs.index(value))
        if moved is not None:
            return moved
    return numbers.expand(shape) if _spreads(tuple(numbers.shape), shape) else None


def _beside(step: Step, numbers: Tensor, shape: tuple[int, ...]) -> Tensor:
    """The numbers of a tensor and, for what is put beside it, its last ones again."""
    axis = int(step.node.args[1] if len(step.node.args) > 1 else step.node.kwargs.get("dim", 0)) % len(shape)
    more = [*shape]
    more[axis] -= numbers.shape[axis]
    return torch.cat((numbers, numbers.narrow(axis, numbers.shape[axis] - 1, 1).expand(more)), axis)
