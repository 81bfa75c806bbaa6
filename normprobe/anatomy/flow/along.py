"""What runs along an axis of a value: the features that the nearest product with weights made, or places (tokens).

Numbers of features and places are sent from that product through the recorded moves; pointwise steps keep them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from normprobe.anatomy.flow.ops import Role, base
from normprobe.anatomy.flow.replay import condensed, counted, replay, signature
from normprobe.anatomy.flow.steps import Flow, Step
from normprobe.anatomy.flow.walk import argument_value

_FARTHEST = 64  # steps back to a product
_PRODUCTS = 4  # products of signals before the one with weights

Way = tuple[int, list[tuple[Step, int]]]
Numbers = tuple[tuple[Tensor, ...], tuple[Tensor, ...]]  # of the features, and of the places, behind each element


@dataclass(frozen=True)
class Along:
    """Whether features, and whether places, change along an axis."""

    features: bool
    places: bool


def along(flow: Flow, value: int, axis: int) -> Along | None:
    """What runs along an axis of `value`; None where it cannot be told."""
    found = axes(flow, value)
    return None if found is None else found[axis]


def axes(flow: Flow, value: int, known: Mapping[int, int] | None = None) -> tuple[Along, ...] | None:
    """What runs along each axis of `value`; None where it cannot be told. Values that are made alike share one answer.

    Args:
        flow: the flow.
        value: the value.
        known: values whose axis of features is told already: where it comes from one of them, no product is looked for.
    """
    way = _way(flow, value, known or {})
    if way is None:
        return None
    start, steps = way
    axis = (known or {}).get(start)
    pair = _multiplies(flow, start) if axis is None else None
    axis = _features(flow, start) if axis is None else axis
    moves = ((step.node, step.outputs.index(v)) for step, v in steps if step.role is Role.MOVE)
    key = ("along", pair, axis, (flow.shape(start), *(flow.shape(v) for _, v in steps)), signature(flow, moves))
    if key not in flow.memo:
        numbers = _numbers(flow, way, pair, axis)
        count = range(len(flow.shape(value)))
        flow.memo[key] = None if numbers is None else tuple(Along(*(changes(n, i) for n in numbers)) for i in count)
    found: tuple[Along, ...] | None = flow.memo[key]
    return found


def parted(flow: Flow, value: int) -> int | None:
    """Into how many vectors the features are parted that run over the last axis of `value` and over leading ones (the
    heads of a query, whatever else lies there); None where it cannot be told."""
    way = _way(flow, value, {})
    numbers = None if way is None else _numbers(flow, way, _multiplies(flow, way[0]), _features(flow, way[0]))
    if numbers is None or len(numbers[0]) != 1 or numbers[0][0].dim() < 3:
        return None
    return len(set(numbers[0][0][..., 0, 0].flatten().tolist()))


def origin(flow: Flow, value: int) -> int | None:
    """The product or the table that the axes of `value` come from; None where it cannot be told."""
    way = _way(flow, value, {})
    return None if way is None else way[0]


def given(flow: Flow, value: int, known: Mapping[int, int]) -> bool:
    """Whether the axes of `value` come from a tensor given to the model: no product made its features, no table."""
    way = _way(flow, value, known)
    step = None if way is None or way[0] in known else flow.made_by(way[0])
    return step is not None and step.role is Role.SOURCE and not step.parameters


def changes(numbers: tuple[Tensor, ...], axis: int) -> bool:
    """Whether numbers change along an axis, what a move put in apart."""
    for each in numbers:
        some = condensed(each)
        before, behind = (some.narrow(axis, i, some.shape[axis] - 1) for i in (0, 1))
        if bool(((before != behind) & (before > 0) & (behind > 0)).any()):
            return True
    return False


def factors(flow: Flow, product: Step) -> tuple[int, int] | None:
    """The two signals that a product multiplies; None where one of its factors is no signal."""
    values = [v for v in map(argument_value, product.node.args) if v is not None][-2:]
    return (values[0], values[1]) if len(values) == 2 and all(flow.levels.signal(v) for v in values) else None


def tokens_meet(flow: Flow, first: int, second: int, other: int = -1) -> bool | None:
    """Whether a product of two signals brings several places together, as it sums over them, or in pairs of a place of
    `first` (axis −2) and one of `second` (axis `other`). None where it cannot be told."""
    inner, rows, columns = along(flow, first, -1), along(flow, first, -2), along(flow, second, other)
    if inner is None or rows is None or columns is None:
        return None
    return inner.places or (rows.places and columns.places)


def _way(flow: Flow, value: int, known: Mapping[int, int]) -> Way | None:
    """The product, the table or the known value that the axes of `value` come from, and the steps from there on with
    what they make."""
    steps: list[tuple[Step, int]] = []
    while math.prod(flow.shape(value)) > 0:
        step = flow.made_by(value)
        if value in known or (step is not None and step.role in (Role.MATMUL, Role.SOURCE)):
            return value, steps[::-1]
        before = None if step is None else followed(flow, step, value)
        if step is None or before is None or len(steps) > _FARTHEST:
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
    return -2 if values and values[0] in step.statics and len(flow.shape(start)) > 1 else -1


def _multiplies(flow: Flow, start: int) -> tuple[int, int] | None:
    """The two matrices of signals whose product `start` is; None where it is one with weights, or a table."""
    step = flow.made_by(start)
    if step is None or step.role is not Role.MATMUL or step.parameters or "convolution" in step.node.op:
        return None
    return factors(flow, step)


def _numbers(
    flow: Flow, way: Way, pair: tuple[int, int] | None, axis: int, products: int = _PRODUCTS
) -> Numbers | None:
    start, steps = way
    found = _fresh(flow.shape(start), axis) if pair is None else _crossed(flow, pair, products)
    for step, value in steps:
        found = None if found is None else _all_sent(flow, step, found, value)
    return found


def _crossed(flow: Flow, pair: tuple[int, int], products: int) -> Numbers | None:
    """The numbers of a product: of the rows of its first factor, and of the columns of its second."""
    ways = [way for v in pair if (way := _way(flow, v, {})) is not None]
    if products == 0 or len(ways) < 2 or len({flow.shape(v)[:-2] for v in pair}) > 1:
        return None
    first, second = (_numbers(flow, w, _multiplies(flow, w[0]), _features(flow, w[0]), products - 1) for w in ways)
    if first is None or second is None or min(len(flow.shape(v)) for v in pair) < 2:
        return None
    shape = (*flow.shape(pair[0])[:-1], flow.shape(pair[1])[-1])
    rows, columns = ([n[..., :1] for n in each] for each in first), ([n[..., :1, :] for n in each] for each in second)
    features, places = (tuple(n.expand(shape) for n in (*r, *c)) for r, c in zip(rows, columns, strict=True))
    return features, places


def _fresh(shape: tuple[int, ...], axis: int) -> Numbers:
    """Features counted on one axis, places on each of the others; a move may put in zeros."""
    axis %= max(1, len(shape))
    places = tuple(counted(shape, i) for i in range(len(shape)) if i != axis)
    return (counted(shape, axis),) if shape else (), places


def followed(flow: Flow, step: Step, value: int) -> int | None:
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


def _all_sent(flow: Flow, step: Step, numbers: Numbers, value: int) -> Numbers | None:
    """The numbers of `value` from those of the input that is followed."""
    found = [[moved(flow, step, n, value) for n in each] for each in numbers]
    kept = [tuple(n for n in each if n is not None) for each in found]
    return (kept[0], kept[1]) if all(len(a) == len(b) for a, b in zip(kept, found, strict=True)) else None


def moved(flow: Flow, step: Step, numbers: Tensor, value: int) -> Tensor | None:
    """Numbers of the input that is followed, sent to `value`; None where the step cannot be run on them."""
    shape = flow.shape(value)
    if step.role is Role.MOVE:
        joined = base(step.node.op) == "aten.cat"
        sent = _beside(step, numbers, shape) if joined else replay(flow, step.node, numbers, step.outputs.index(value))
        if sent is not None:
            return sent
    return numbers.expand(shape) if _spreads(tuple(numbers.shape), shape) else None


def _beside(step: Step, numbers: Tensor, shape: tuple[int, ...]) -> Tensor:
    """The numbers of a tensor and, for what is put beside it, its last ones again."""
    axis = int(step.node.args[1] if len(step.node.args) > 1 else step.node.kwargs.get("dim", 0)) % len(shape)
    some = condensed(numbers, axis)
    last = some.narrow(axis, some.shape[axis] - 1, 1)
    more = [shape[i] - some.shape[i] if i == axis else size for i, size in enumerate(last.shape)]
    return torch.cat((some, last.expand(more)), axis).expand(shape)
