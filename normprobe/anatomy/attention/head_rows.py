"""Which rows of which weight feed each head: index tensors are sent through the recorded views."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from normprobe.anatomy.attention.sides import Side
from normprobe.anatomy.flow.ops import base
from normprobe.anatomy.flow.replay import replay
from normprobe.anatomy.flow.steps import Flow, Step
from normprobe.capture.leaves import replaced
from normprobe.capture.trace import Node, Ref
from normprobe.records import HeadRows

Shape = tuple[int, ...]
Ranges = tuple[tuple[int, int], ...]

Views = list[tuple[Node, int]]  # recorded operations, and which of their outputs goes on


def head_rows(flow: Flow, value: int, side: Side, heads: int) -> HeadRows | None:
    """The rows of the projection's weight behind each head of the attention operand `value`; None where they cannot be
    told (another operation than a view lies between, or the weight is computed). Sites that are built alike share one
    answer."""
    if side.projection is None:
        return None
    moves = [(step.node, place) for step, place in reversed(side.moves)]
    output = flow.shape(side.projection.outputs[0])
    for name, size, views in _weights(flow, side.projection):
        key = ("head rows", size, _signature(views), output, _signature(moves), flow.shape(value), heads)
        if key not in flow.memo:
            flow.memo[key] = _read(size, views, output, moves, flow.shape(value), heads)
        if flow.memo[key] is not None:
            axis, rows = flow.memo[key]
            return HeadRows(parameter=name, axis=axis, heads=rows)
    return None


def _read(
    size: Shape, views: Views, output: Shape, moves: Views, operand: Shape, heads: int
) -> tuple[int, tuple[Ranges, ...]] | None:
    """The axis of output features in a parameter of shape `size`, and the rows on it that feed each head."""
    features = _features(size, views, output[-1])
    if features is None:
        return None
    axis, rows = features
    index: Tensor | None = rows.expand(output)
    for node, place in moves:
        index = None if index is None else replay(node, index, place)
    if index is None or index.shape != operand or index.dim() < 3:
        return None
    per_head = index.reshape(-1, *index.shape[-2:])
    if per_head.shape[0] % heads:
        return None
    found = []
    for head in per_head[:heads]:  # every token has the same rows, on whichever of the last two axes tokens are
        found.append(_ranges(sorted({*head[0].tolist(), *head[:, 0].tolist()})))
    return axis, tuple(found)


def _features(size: Shape, views: Views, width: int) -> tuple[int, Tensor] | None:
    """Row and column numbers of the parameter are sent through the views; the one that changes along the output's
    features is the axis, and says which row is behind each feature."""
    for axis, numbers in enumerate(torch.meshgrid(*(torch.arange(n) for n in size), indexing="ij")):
        moved: Tensor | None = numbers
        for node, place in views:
            moved = None if moved is None else replay(node, moved, place)
        if moved is None:
            continue
        row = moved.reshape(-1, width)
        others = row[[0, len(row) // 2, -1]]  # views move whole axes: three rows stand for all
        if bool((others == others[:1]).all()):
            return axis, row[0]
    return None


def _signature(views: Views) -> tuple[Any, ...]:
    """Equal for two chains of views only if the same operations were given the same arguments."""
    rows = []
    for node, place in views:
        arguments = replaced((node.args, node.kwargs), lambda _: "%", of=Ref)
        rows.append((node.op, repr(arguments), place))
    return tuple(rows)


def _ranges(rows: list[int]) -> Ranges:
    """Sorted row numbers as half-open ranges."""
    found: list[tuple[int, int]] = []
    for row in rows:
        if found and found[-1][1] == row:
            found[-1] = (found[-1][0], row + 1)
        else:
            found.append((row, row + 1))
    return tuple(found)


def _weights(flow: Flow, projection: Step) -> Iterator[tuple[str, Shape, Views]]:
    """Two-dimensional parameters behind a projection: name, shape, and the views between it and the product."""
    width = flow.shape(projection.outputs[0])[-1]
    for value in projection.statics:
        shape = flow.trace.values[value].shape
        if len(shape) in (2, 3) and shape[-1] == width:  # three axes where the weight is repeated for a batch
            found = _views(flow, value)
            if found is not None:
                yield found


def _views(flow: Flow, value: int) -> tuple[str, Shape, Views] | None:
    """Name and shape of the parameter that a static value is a view or cast of, and the operations between."""
    steps: Views = []
    while True:
        node = flow.trace.producer(value)
        if node.op == "parameter":
            shape = flow.trace.values[value].shape
            return (node.name, shape, steps[::-1]) if len(shape) == 2 else None
        if not (getattr(node.function, "is_view", False) or base(node.op) in ("aten._to_copy", "aten.clone")):
            return None
        steps.append((node, node.outputs.index(value)))
        value = node.inputs[0]
