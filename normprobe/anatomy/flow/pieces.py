"""Pieces of a concatenation: a split that takes it apart where it was joined gives back what went in, and a sum over
the axis of a stack adds what was stacked."""

from __future__ import annotations

from itertools import accumulate, pairwise

from normprobe.anatomy.flow.ops import JOINS, base, joined_axis
from normprobe.capture.trace import Node, Ref, Trace

_SUMS = frozenset({"aten.sum", "aten.mean"})
_Range = tuple[int, int]


def pieces(trace: Trace) -> dict[int, int]:
    """The outputs of splits, slices and selections that are tensors which were joined or stacked just before, with
    those tensors; only of joined tensors that nothing reads as a whole."""
    joined = {v for node in trace.nodes if base(node.op) in JOINS for v in node.outputs}
    joined -= {v for _, v in trace.outputs}
    found: dict[int, dict[int, int]] = {v: {} for v in joined}
    for node in trace.nodes:
        for value in joined.intersection(node.inputs):
            held = taken(trace, node)
            if len(held) < len(node.outputs):
                joined.discard(value)
            found[value].update(held)
    return {output: piece for value in joined for output, piece in found[value].items()}


def summands(trace: Trace, node: Node) -> tuple[int, ...]:
    """The tensors whose sum or mean `node` is, as it sums over the axis on which they were stacked or joined one by
    one; empty where it is no such sum."""
    axes = node.args[1] if base(node.op) in _SUMS and len(node.args) > 1 else None
    if not isinstance(axes, (list, tuple)) or len(axes) != 1 or not isinstance(node.args[0], Ref):
        return ()
    value = node.args[0].value
    order = list(range(len(trace.values[value].shape)))  # which axis of `value` each axis of the summed tensor is
    summed = int(axes[0]) % len(order)
    while base((maker := trace.producer(value)).op) in ("aten.permute", "aten.transpose"):
        moved = _permutation(maker, len(order))
        order, value = [moved[i] for i in order], maker.args[0].value
    axis = order.pop(summed)
    if base(maker.op) not in JOINS or joined_axis(maker, len(order) + 1) != axis or order != sorted(order):
        return ()
    parts = tuple(ref.value for ref in maker.args[0])
    single = base(maker.op) == "aten.stack" or all(trace.values[v].shape[axis : axis + 1] == (1,) for v in parts)
    return parts if single and len(set(parts)) == len(parts) > 1 else ()


def _permutation(node: Node, rank: int) -> list[int]:
    """Which axis of its input each axis of a permuted tensor is."""
    if base(node.op) == "aten.permute":
        return [int(i) % rank for i in node.args[1]]
    one, two = (int(i) % rank for i in node.args[1:3])
    order = list(range(rank))
    order[one], order[two] = two, one
    return order


def taken(trace: Trace, node: Node) -> dict[int, int]:
    """The outputs of a node that are tensors which its input was joined from."""
    joined = node.args[0] if node.args else None
    if not isinstance(joined, Ref):
        return {}
    maker = trace.producer(joined.value)
    stacked = base(maker.op) == "aten.stack"
    if base(maker.op) not in JOINS:
        return {}
    shape = trace.values[joined.value].shape
    tensors = [ref.value for ref in maker.args[0]]
    if any(not stacked and len(trace.values[v].shape) != len(shape) for v in tensors):  # empty ones may lack axes
        return {}
    axis = joined_axis(maker, len(shape))
    given = _ranges(node, axis, shape, selects=stacked)
    sizes = [1 if stacked else trace.values[v].shape[axis] for v in tensors]
    starts = list(pairwise(accumulate(sizes, initial=0)))
    held = {where: value for where, value in zip(starts, tensors, strict=True)}
    return {out: held[where] for out, where in zip(node.outputs, given, strict=False) if where in held}


def _ranges(node: Node, axis: int, shape: tuple[int, ...], selects: bool) -> list[_Range]:
    """Which part of `axis` each output holds; empty where it works on another axis."""
    size, op, args = shape[axis], base(node.op), [*node.args[1:], *node.kwargs.values()]
    if selects:
        if op == "aten.unbind" and joined_axis(node, len(shape)) == axis:
            return list(pairwise(range(size + 1)))
        if op == "aten.select" and int(args[0]) % len(shape) == axis:
            at = int(args[1]) % size
            return [(at, at + 1)]
        return []
    if op in ("aten.split", "aten.split_with_sizes"):
        if (int(args[1]) if len(args) > 1 else 0) % len(shape) != axis:
            return []
        each = args[0]
        ends = list(accumulate(each)) if isinstance(each, (list, tuple)) else [*range(each, size, each), size]
        return list(pairwise([0, *(int(end) for end in ends)]))
    if op == "aten.slice" and int(args[0] if args else 0) % len(shape) == axis and len(args) < 4:
        return [_slice(size, *(args[1:3]))]
    return []


def _slice(size: int, start: int | None = None, end: int | None = None) -> _Range:
    first, last, _ = slice(start, end).indices(size)
    return first, last
