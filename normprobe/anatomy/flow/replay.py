"""Recorded moves run again on other tensors, so that indices can be sent through them."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from normprobe.anatomy.flow.ops import PIECE, base
from normprobe.anatomy.flow.steps import Flow
from normprobe.capture.leaves import replaced
from normprobe.capture.trace import Node, Ref

ABSENT = -1  # stands where a move puts in something from elsewhere
_LARGEST = 1 << 26  # elements; what a move would really copy beyond that is not looked at
_COPIES = frozenset(f"aten.{n}" for n in ("_to_copy", "clone", "contiguous", "detach", "lift_fresh"))
_SHAPES = frozenset(f"aten.{n}" for n in ("view", "_unsafe_view", "reshape", "_reshape_alias"))

Moves = Sequence[tuple[Node, int]]  # recorded moves, and which of their outputs goes on


def sent(flow: Flow, moves: Moves, numbers: Tensor) -> Tensor | None:
    """Numbers of elements sent through a chain of recorded moves; None where one cannot be followed."""
    found: Tensor | None = numbers
    for node, place in moves:
        found = None if found is None else replay(flow, node, found, place)
    return found


def counted(shape: Sequence[int], axis: int) -> Tensor:
    """The places along one axis from 1 on, the same along all others, which take no memory."""
    axis %= len(shape)
    numbers = torch.arange(1, shape[axis] + 1, dtype=torch.int32)
    return numbers.view(-1, *(1 for _ in shape[axis + 1 :])).expand(*shape)


def condensed(numbers: Tensor, keep: int | None = None) -> Tensor:
    """One of each axis along which a tensor is spread without memory, but for the axis to keep."""
    for axis, (size, stride) in enumerate(zip(numbers.shape, numbers.stride(), strict=True)):
        if stride == 0 and size > 1 and axis != keep:
            numbers = numbers.narrow(axis, 0, 1)
    return numbers


def replay(flow: Flow, node: Node, tensor: Tensor, place: int) -> Tensor | None:
    """Run a recorded view, copy or pick on another tensor in place of the signal that it reads.

    What it reads besides must depend on no signal: indices are as recorded, other contents are `ABSENT`.
    None where that does not hold, or the values are needed themselves.
    """
    name = base(node.op)
    if node.op == PIECE or name in _COPIES:
        return tensor
    if node.function is None:
        return None
    if name in _SHAPES and isinstance(node.args[1], (list, tuple)):
        return reshaped(tensor, node.args[1])
    if tensor.numel() > _LARGEST and not getattr(node.function, "is_view", False):
        return None
    read = list(dict.fromkeys(node.inputs))
    signals = [v for v in read if flow.levels.signal(v)] or read
    others = {v: _other(flow, v, tensor) for v in read if v not in signals[:1]}
    if len(signals) != 1 or any(other is None for other in others.values()):
        return None
    args, kwargs = replaced((node.args, node.kwargs), lambda ref: others.get(ref.value, tensor), of=Ref)
    function: Any = node.function
    try:
        output = function(*args, **kwargs)
    except (RuntimeError, TypeError, IndexError):  # a view of another dtype (a rotary embedding's), -inf filled in
        return None
    made = output if isinstance(output, (tuple, list)) else [output]
    return made[place] if isinstance(made[place], Tensor) else None


def reshaped(tensor: Tensor, sizes: Sequence[int]) -> Tensor | None:
    """A tensor in another shape; what is spread without memory stays so: only axes that are merged are copied."""
    known = math.prod(n for n in sizes if n != -1)
    shape = [tensor.numel() // known if n == -1 and known else n for n in sizes]
    if math.prod(shape) != tensor.numel() or tensor.numel() == 0:
        return None
    narrow, sizes = tensor, []
    for axes, fresh in _groups(tensor.shape, shape):
        if all(tensor.stride(i) == 0 or tensor.shape[i] == 1 for i in axes):
            for i in axes:
                narrow = narrow.narrow(i, 0, 1)
            fresh = [1 for _ in fresh]
        sizes = [*sizes, *fresh]
    return narrow.reshape(sizes).expand(shape)


def _groups(old: Sequence[int], new: Sequence[int]) -> Iterator[tuple[list[int], list[int]]]:
    """The smallest runs of axes, and of the sizes that they become, that hold as many elements."""
    i = j = 0
    while i < len(old) or j < len(new):
        axes, fresh = ([i] if i < len(old) else []), ([new[j]] if j < len(new) else [])
        i, j = i + len(axes), j + len(fresh)
        while (held := math.prod(old[k] for k in axes)) != math.prod(fresh):
            if held < math.prod(fresh):
                axes, i = [*axes, i], i + 1
            else:
                fresh, j = [*fresh, new[j]], j + 1
        yield axes, fresh


def _other(flow: Flow, value: int, like: Tensor) -> Tensor | None:
    about = flow.trace.values[value]
    if about.dtype.is_floating_point:
        return torch.full((), ABSENT).to(like.dtype).expand(about.shape)
    return None if flow.levels.signal(value) else flow.statics.tensor(value)


def signature(flow: Flow, views: Iterable[tuple[Node, int]]) -> tuple[Any, ...]:
    """Equal for two chains of views only if the same operations were given the same arguments, and equal indices."""

    def content(ref: Ref) -> object:
        if flow.levels.signal(ref.value) or flow.floating(ref.value):
            return "%"
        about = flow.trace.values[ref.value]
        held = flow.statics.tensor(ref.value)
        if held is None:
            return ref
        return about.shape, about.dtype, hashlib.blake2b(held.contiguous().cpu().numpy().tobytes()).hexdigest()

    rows = []
    for node, place in views:
        arguments = replaced((node.args, node.kwargs), content, of=Ref)
        rows.append((node.op, repr(arguments), place))
    return tuple(rows)
