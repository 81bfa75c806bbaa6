"""Which rows of which weight feed each head: index tensors are sent through the recorded views."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from normprobe.anatomy.attention_sides import Side
from normprobe.anatomy.flow import Flow, Step
from normprobe.anatomy.ops import base
from normprobe.capture.trace import Node, Ref
from normprobe.records import HeadRows


@dataclass(frozen=True)
class _Weight:
    """A projection's parameter, its axis of output features, and the row behind each feature of the output."""

    name: str
    axis: int
    rows: tuple[int, ...]


def head_rows(flow: Flow, value: int, side: Side, heads: int) -> HeadRows | None:
    """The rows of the projection's weight behind each head of the attention operand `value`; None where they cannot be
    told (another operation than a view lies between, or the weight is computed)."""
    weight = _weight(flow, side.projection) if side.projection is not None else None
    if side.projection is None or weight is None:
        return None
    index = torch.tensor(weight.rows).expand(flow.shape(side.projection.outputs[0]))
    for step, place in reversed(side.moves):
        moved = replay(step.node, index, place)
        if moved is None:
            return None
        index = moved
    if index.shape != flow.shape(value) or index.dim() < 3:
        return None
    per_head = index.reshape(-1, *index.shape[-2:])
    if per_head.shape[0] % heads:
        return None
    found = []
    for head in per_head[:heads]:  # every token has the same rows, on whichever of the last two axes tokens are
        found.append(_ranges(sorted({*head[0].tolist(), *head[:, 0].tolist()})))
    return HeadRows(parameter=weight.name, axis=weight.axis, heads=tuple(found))


def _ranges(rows: list[int]) -> tuple[tuple[int, int], ...]:
    """Sorted row numbers as half-open ranges."""
    found: list[tuple[int, int]] = []
    for row in rows:
        if found and found[-1][1] == row:
            found[-1] = (found[-1][0], row + 1)
        else:
            found.append((row, row + 1))
    return tuple(found)


def _weight(flow: Flow, projection: Step) -> _Weight | None:
    """The two-dimensional parameter behind a projection. Row and column numbers of the parameter are sent through the
    views between; the one that changes along the output's features is the axis."""
    width = flow.shape(projection.outputs[0])[-1]
    for value in projection.statics:
        shape = flow.trace.values[value].shape
        if len(shape) not in (2, 3) or shape[-1] != width:  # three axes where the weight is repeated for a batch
            continue
        chain = _views(flow, value)
        if chain is None:
            continue
        name, size, steps = chain
        for axis, numbers in enumerate(torch.meshgrid(*(torch.arange(n) for n in size), indexing="ij")):
            moved: Tensor | None = numbers
            for node, place in steps:
                moved = None if moved is None else replay(node, moved, place)
            if moved is None:
                continue
            row = moved.reshape(-1, width)
            others = row[[0, len(row) // 2, -1]]  # views move whole axes: three rows stand for all
            if bool((others == others[:1]).all()):
                return _Weight(name, axis, tuple(row[0].tolist()))
    return None


def _views(flow: Flow, value: int) -> tuple[str, tuple[int, ...], list[tuple[Node, int]]] | None:
    """Name and shape of the parameter that a static value is a view or cast of, and the operations between."""
    steps: list[tuple[Node, int]] = []
    while True:
        node = flow.trace.producer(value)
        if node.op == "parameter":
            shape = flow.trace.values[value].shape
            return (node.name, shape, steps[::-1]) if len(shape) == 2 else None
        if not (getattr(node.function, "is_view", False) or base(node.op) in ("aten._to_copy", "aten.clone")):
            return None
        steps.append((node, node.outputs.index(value)))
        value = node.inputs[0]


def replay(node: Node, tensor: Tensor, place: int) -> Tensor | None:
    """Run a recorded view or copy on another tensor; None where it needs more than that one tensor."""
    if node.function is None or sum(isinstance(a, Ref) for a in pytree.tree_leaves((node.args, node.kwargs))) != 1:
        return None
    if base(node.op) == "aten._to_copy":
        return tensor
    args, kwargs = pytree.tree_map_only(Ref, lambda _: tensor, (node.args, node.kwargs))
    function: Any = torch.ops.aten.reshape.default if base(node.op) == "aten.view" else node.function
    try:
        output = function(*args, **kwargs)
    except RuntimeError:  # a view of another dtype (complex numbers of a rotary embedding): rows cannot be told
        return None
    made = output if isinstance(output, (tuple, list)) else [output]
    return made[place] if isinstance(made[place], Tensor) else None
