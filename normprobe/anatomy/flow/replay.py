"""Recorded moves run again on other tensors, so that indices can be sent through them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from normprobe.anatomy.flow.ops import PIECE, base
from normprobe.anatomy.flow.steps import Flow
from normprobe.capture.leaves import replaced
from normprobe.capture.trace import Node, Ref

ABSENT = -1  # stands where a move puts in something from elsewhere


def replay(flow: Flow, node: Node, tensor: Tensor, place: int) -> Tensor | None:
    """Run a recorded view, copy or pick on another tensor in place of the signal that it reads.

    What it reads besides must depend on no signal: indices are as recorded, other contents are `ABSENT`.
    None where that does not hold, or the values are needed themselves.
    """
    if node.op == PIECE:
        return tensor
    if node.function is None:
        return None
    if base(node.op) == "aten._to_copy":
        return tensor
    signals = [v for v in node.inputs if flow.levels.signal(v)] or list(node.inputs)
    others = {v: _other(flow, v, tensor) for v in node.inputs if v not in signals[:1]}
    if len(signals) != 1 or any(other is None for other in others.values()):
        return None
    args, kwargs = replaced((node.args, node.kwargs), lambda ref: others.get(ref.value, tensor), of=Ref)
    function: Any = torch.ops.aten.reshape.default if base(node.op) == "aten.view" else node.function
    try:
        output = function(*args, **kwargs)
    except (RuntimeError, TypeError):  # a view of another dtype (complex numbers of a rotary embedding), -inf filled in
        return None
    made = output if isinstance(output, (tuple, list)) else [output]
    return made[place] if isinstance(made[place], Tensor) else None


def _other(flow: Flow, value: int, like: Tensor) -> Tensor | None:
    about = flow.trace.values[value]
    if about.dtype.is_floating_point:
        return torch.full((), ABSENT).to(like.dtype).expand(about.shape)
    return None if flow.levels.signal(value) else flow.statics.tensor(value)


def signature(flow: Flow, views: Iterable[tuple[Node, int]]) -> tuple[Any, ...]:
    """Equal for two chains of views only if the same operations were given the same arguments, and equal indices."""

    def content(ref: Ref) -> object:
        about = flow.trace.values[ref.value]
        if flow.levels.signal(ref.value) or about.dtype.is_floating_point:
            return "%"
        held = flow.statics.tensor(ref.value)
        return ref if held is None else (about.shape, held.flatten().tolist())

    rows = []
    for node, place in views:
        arguments = replaced((node.args, node.kwargs), content, of=Ref)
        rows.append((node.op, repr(arguments), place))
    return tuple(rows)
