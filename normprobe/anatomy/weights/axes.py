"""Which axes of a parameter number the inputs and the outputs of the product that uses it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from normprobe.anatomy.flow.ops import base
from normprobe.capture.trace import Node, Ref, Trace

Axes = list[frozenset[int]]  # for each axis of a tensor the axes of the parameter that lie on it

_KEEPING = frozenset({"aten.clone", "aten._to_copy", "aten.detach", "aten.contiguous", "aten.alias", "aten.expand"})
_SLICING = frozenset({"aten.slice", "aten.split", "aten.split_with_sizes", "aten.chunk", "aten.narrow"})
_RESHAPING = frozenset({"aten.view", "aten._unsafe_view", "aten.reshape", "aten._reshape_alias"})
_PICKING = frozenset({"aten.index", "aten.index_select"})
_RIGHT = frozenset({"aten.mm", "aten.bmm", "aten.matmul", "aten._grouped_mm"})
_BIASED = frozenset({"aten.addmm", "aten.baddbmm"})
_CONVOLUTIONS = frozenset({"aten.convolution", "aten._convolution"})
_FIRST_AND_SECOND: tuple[Literal[0, 1], ...] = (0, 1)


@dataclass(frozen=True)
class Layout:
    """How a product uses a parameter: its fans as in `WeightSite`, the axis of its outputs, its kind, and which of the
    two factors it is."""

    fan_in: int
    fan_out: int
    output_axis: int
    kind: Any
    operand: Literal[0, 1]


def layouts(trace: Trace, node: Node) -> Iterator[tuple[str, Layout]]:
    """The parameters that a product or convolution uses as matrices, with their layout; those whose way to it is more
    than a move of their elements are left out."""
    name = base(node.op)
    if name in _CONVOLUTIONS:
        found = origin(trace, node.args[1])
        if found is not None and len(found[1]) > 2:
            yield found[0], _kernel(found[1], node.args[6], node.args[8])
        return
    operands = node.args[:2] if name in _RIGHT else node.args[1:3] if name in _BIASED else ()
    for operand, which in zip(operands, _FIRST_AND_SECOND, strict=False):
        found = origin(trace, operand)
        if found is not None and len(found[2]) > 1:
            layout = _matrix(found[1], found[2], trace.values[operand.value].shape, which)
            if layout is not None:
                yield found[0], layout


def _kernel(shape: Sequence[int], transposed: bool, groups: int) -> Layout:
    """Of [out, in / groups, places…]; transposed, of [in, out / groups, places…]."""
    places = math.prod(shape[2:])
    if transposed:
        return Layout(shape[0] // groups * places, shape[1] * places, 1, "conv", 1)
    return Layout(shape[1] * places, shape[0] // groups * places, 0, "conv", 1)


def _matrix(shape: Sequence[int], axes: Axes, operand: Sequence[int], which: Literal[0, 1]) -> Layout | None:
    """Of a matrix; the product sums over the last axis of its first factor, the last but one of its second. A parameter
    of one axis is none."""
    inside, outside = (-1, -2) if which == 0 else (-2, -1)
    sums, makes = axes[inside], axes[outside]
    if not sums or not makes or sums & makes:
        return None
    others = frozenset(range(len(shape))) - sums - makes
    many = math.prod(shape[a] for a in others) > 1
    return Layout(
        operand[inside],
        math.prod(shape[a] for a in makes),
        max(makes, key=lambda a: (shape[a], -a)),
        "experts" if many else "linear",
        which,
    )


def origin(trace: Trace, operand: object) -> tuple[str, tuple[int, ...], Axes] | None:
    """The parameter that an operand is a moved copy of, its shape, and where its axes lie on the operand."""
    way: list[Node] = []
    while isinstance(operand, Ref):
        node = trace.producer(operand.value)
        if node.op == "parameter":
            shape = trace.values[operand.value].shape
            axes: Axes | None = [frozenset({i}) for i in range(len(shape))]
            for move in reversed(way):
                axes = None if axes is None else _moved(trace, move, axes)
            return None if axes is None else (node.name, shape, axes)
        if base(node.op) not in MOVES or not node.args:
            return None
        way.append(node)
        operand = node.args[0]
    return None


def _moved(trace: Trace, node: Node, axes: Axes) -> Axes | None:
    after = trace.values[node.outputs[0]].shape
    found = MOVES[base(node.op)](trace, node, axes)
    return found if found is not None and len(found) == len(after) else None


def _keep(trace: Trace, node: Node, axes: Axes) -> Axes:
    rank = len(trace.values[node.outputs[0]].shape)
    return [frozenset()] * (rank - len(axes)) + axes  # what `expand` adds comes first


def _turn(trace: Trace, node: Node, axes: Axes) -> Axes:
    order = list(range(len(axes)))
    a, b = (int(i) for i in node.args[1:3]) if len(node.args) > 2 else (0, -1)
    order[a], order[b] = order[b], order[a]
    return [axes[i] for i in order]


def _permute(trace: Trace, node: Node, axes: Axes) -> Axes:
    return [axes[int(i)] for i in node.args[1]]


def _unsqueeze(trace: Trace, node: Node, axes: Axes) -> Axes:
    place = int(node.args[1]) % (len(axes) + 1)
    return [*axes[:place], frozenset(), *axes[place:]]


def _drop(trace: Trace, node: Node, axes: Axes) -> Axes:
    """One matrix of several is taken out."""
    place = int(node.args[1]) % len(axes) if len(node.args) > 1 else 0
    return [*axes[:place], *axes[place + 1 :]]


def _squeeze(trace: Trace, node: Node, axes: Axes) -> Axes:
    size = trace.values[node.inputs[0]].shape
    wanted = node.args[1] if len(node.args) > 1 else range(len(size))
    places = {int(i) % len(size) for i in ([wanted] if isinstance(wanted, int) else wanted)}
    return [a for i, a in enumerate(axes) if i not in places or size[i] != 1]


def _pick(trace: Trace, node: Node, axes: Axes) -> Axes | None:
    """Rows are picked on the first axis; what numbers them is no axis of the parameter any more."""
    if base(node.op) == "aten.index_select":
        return axes
    indices = node.args[1]
    if len(indices) != 1 or not isinstance(indices[0], Ref):
        return None
    return [frozenset()] * len(trace.values[indices[0].value].shape) + axes[1:]


def _reshape(trace: Trace, node: Node, axes: Axes) -> Axes | None:
    """Axes that are merged lie on one, and one that is split lies on all its parts."""
    old, new = trace.values[node.inputs[0]].shape, trace.values[node.outputs[0]].shape
    if math.prod(old) != math.prod(new):
        return None
    found: Axes = []
    i = 0
    held, made = 1, 1
    lying: frozenset[int] = frozenset()
    for size in new:
        if made == held:  # a new group of axes begins
            lying, held, made = frozenset(), 1, 1
        made *= size
        while held % made and i < len(old):
            held, lying, i = held * old[i], lying | axes[i], i + 1
        found.append(lying if size > 1 else frozenset())
    return found


_Move = Callable[[Trace, Node, Axes], "Axes | None"]
MOVES: dict[str, _Move] = {
    **dict.fromkeys(_KEEPING, _keep),
    **dict.fromkeys(_SLICING, lambda trace, node, axes: axes),
    **dict.fromkeys(_RESHAPING, _reshape),
    **dict.fromkeys(_PICKING, _pick),
    **dict.fromkeys(("aten.t", "aten.transpose"), _turn),
    **dict.fromkeys(("aten.select", "aten.unbind"), _drop),
    "aten.permute": _permute,
    "aten.unsqueeze": _unsqueeze,
    "aten.squeeze": _squeeze,
}
