"""What runs along an axis of a value: the features that the nearest product with weights made, or places (tokens).

Numbers of features and places are sent from that product through the recorded moves; pointwise steps keep them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from normprobe.anatomy.flow.ops import Role, base
from normprobe.anatomy.flow.replay import replay
from normprobe.anatomy.flow.steps import Flow, Step
from normprobe.anatomy.flow.walk import argument_value

_FARTHEST = 64  # steps back to a product with weights
_LARGEST = 1 << 24  # elements; larger values are not looked at

Numbers = tuple[Tensor, Tensor]  # of the feature and of the place behind each element


@dataclass(frozen=True)
class Along:
    """Whether features, and whether places, change along an axis."""

    features: bool
    places: bool


def along(flow: Flow, value: int, axis: int) -> Along | None:
    """What runs along an axis of `value`; None where it cannot be told."""
    key = ("along", value, axis % len(flow.shape(value)))
    if key not in flow.memo:
        numbers = _numbers(flow, value, _FARTHEST)
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


def _numbers(flow: Flow, value: int, farthest: int) -> Numbers | None:
    way: list[tuple[Step, int, int]] = []
    found: Numbers | None = None
    while found is None:
        step = flow.made_by(value)
        if step is None or len(way) > farthest or math.prod(flow.shape(value)) > _LARGEST:
            return None
        found = _begin(flow, step, value, farthest - len(way))
        if found is None:
            before = _followed(flow, step, value)
            if before is None:
                return None
            way.append((step, before, value))
            value = before
    for step, before, value in reversed(way):
        features, places = (_sent(flow, step, n, before, value) for n in found)
        if features is None or places is None:
            return None
        found = features, places
    return found


def _begin(flow: Flow, step: Step, value: int, farthest: int) -> Numbers | None:
    """The numbers of what a product or a table makes; None for other steps."""
    if step.role is not Role.MATMUL:
        return _fresh(flow.shape(value), -1) if step.role is Role.SOURCE else None
    pair = factors(flow, step) if not step.parameters else None
    if pair is None:
        return _fresh(flow.shape(value), 1 if "convolution" in step.node.op else -1)
    first, second = (_numbers(flow, v, farthest // 2) for v in pair)
    if first is None or second is None:
        return None
    rows, columns = (n[..., :1] for n in first), (n[..., :1, :] for n in second)
    features, places = (r * (int(c.max()) + 1) + c for r, c in zip(rows, columns, strict=True))
    return features, places


def _fresh(shape: tuple[int, ...], axis: int) -> Numbers:
    """Features counted on one axis from 1 on, places on all others; a move may put in zeros."""
    counted = torch.arange(1, math.prod(shape) // shape[axis] + 1)
    places = counted.view(*(n for i, n in enumerate(shape) if i != axis % len(shape))).unsqueeze(axis)
    features = torch.arange(1, shape[axis] + 1).view(-1, *(1 for _ in shape[axis % len(shape) + 1 :]))
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


def _sent(flow: Flow, step: Step, numbers: Tensor, before: int, value: int) -> Tensor | None:
    """The numbers of `value` from those of the input `before`."""
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
