"""From a query, key or value back to the projection it comes from: norm, rotary embedding, scale, and weight rows."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from normprobe.anatomy.flow import Flow, Step
from normprobe.anatomy.ops import LIGHT, WEIGHTY, Role, base
from normprobe.anatomy.walk import backward, constant_factor
from normprobe.capture.trace import Node, Ref
from normprobe.records import HeadRows

_MIXING = LIGHT | {Role.ADD, Role.GATE}


@dataclass
class Side:
    """What lies between one operand of attention and its projection.

    `factor` is the constant that the operand was multiplied by (None: not constant); `mixed` says that a rotary
    embedding (or another mixing of features) was passed; `norm_after_mix` that the norm comes after it.
    """

    factor: float | None = 1.0
    scale_parameters: tuple[str, ...] = ()
    norms: tuple[Step, ...] = ()
    mixed: bool = False
    norm_after_mix: bool = False
    projection: Step | None = None
    moves: list[tuple[Step, int]] = field(default_factory=list)  # views from operand to projection, which output


def trace_side(flow: Flow, value: int) -> Side:
    """Walk back from an operand over views, constant scales, norms and rotary embeddings to a product with weights."""
    side = Side()
    while True:
        step = flow.made_by(value)
        if step is None:
            return side
        if step.role is Role.MATMUL and step.parameters:
            side.projection = step
            return side
        following = _pass(flow, step, value, side)
        if following is None:
            return side
        value = following


def _pass(flow: Flow, step: Step, value: int, side: Side) -> int | None:
    """Go one step back; None where the way ends."""
    if step.role is Role.NORM and not side.norms:
        side.norms, side.norm_after_mix = (step,), not side.mixed
        return step.inputs[0]
    if step.role is Role.MOVE and len(step.inputs) == 1:
        side.moves.append((step, step.outputs.index(value)))
        return step.inputs[0]
    if step.role in (Role.SCALE, Role.SHIFT) and len(step.inputs) == 1:
        return _scale(flow, step, side)
    if step.role in _MIXING:
        origin, norms = _single_origin(flow, value)
        if origin is not None and flow.shape(origin) == flow.shape(value):
            if norms and not side.norms:  # heads split apart, normed one by one, put together again
                side.norms, side.norm_after_mix = tuple(norms[::-1]), not side.mixed
            side.mixed = side.mixed or not norms
            return origin
    return None


def _scale(flow: Flow, step: Step, side: Side) -> int:
    if step.role is Role.SCALE:
        constant = constant_factor(flow, step)
        if constant is None and not step.parameters and _unit_scale(flow, step):
            constant = 1.0
        side.factor = None if side.factor is None or constant is None else side.factor * constant
        side.scale_parameters += step.parameters
    return step.inputs[0]


def _unit_scale(flow: Flow, step: Step) -> bool:
    """Whether a factor depends on structure alone (a mask or an embedding of positions): no change of scale."""
    return any(flow.levels.of[v] == 1 for v in step.statics)


def _single_origin(flow: Flow, value: int) -> tuple[int | None, list[Step]]:
    """The nearest earlier value that all ways into `value` pass, over mixing steps and norms only (those are given
    too, the first in time last); None where there is none."""
    done: set[int] = set()
    norms: list[Step] = []
    for current, step in backward(flow, value, lambda step, v: False):
        if step is None or len(done) > 64:
            return None, norms
        if done and not _pending(flow, done, current):
            return current, norms
        if step.role in WEIGHTY:
            return None, norms
        if step.role is Role.NORM:
            norms.append(step)
        done.add(current)
    return None, norms


def _pending(flow: Flow, done: set[int], current: int) -> bool:
    """Whether values read by the done ones remain besides `current`."""
    makers = [flow.made_by(value) for value in done]
    return any(v not in done and v != current for m in makers if m is not None for v in m.inputs)


def head_rows(flow: Flow, value: int, side: Side, heads: int) -> HeadRows | None:
    """Which output features of the projection's weight feed each head: an index tensor is sent through the views."""
    projection = side.projection
    if projection is None:
        return None
    weight = _weight(flow, projection)
    if weight is None:
        return None
    name, axis = weight
    output = flow.shape(projection.outputs[0])
    index = torch.arange(output[-1]).expand(output).contiguous()
    for step, place in reversed(side.moves):
        moved = _replay(step.node, index, place)
        if moved is None:
            return None
        index = moved
    if index.shape != flow.shape(value):
        return None
    return _rows(index, name, axis, heads)


def _rows(index: Tensor, name: str, axis: int, heads: int) -> HeadRows | None:
    per_head = index.reshape(-1, *index.shape[-2:]) if index.dim() > 3 else index
    if per_head.shape[0] % heads or index.dim() < 3:
        return None
    found = []
    for head in per_head[:heads]:  # every token has the same rows, on whichever of the last two axes tokens are
        found.append(_ranges(sorted({*head[0].tolist(), *head[:, 0].tolist()})))
    return HeadRows(parameter=name, axis=axis, heads=tuple(found))


def _ranges(rows: list[int]) -> tuple[tuple[int, int], ...]:
    """Sorted row numbers as half-open ranges."""
    found: list[tuple[int, int]] = []
    for row in rows:
        if found and found[-1][1] == row:
            found[-1] = (found[-1][0], row + 1)
        else:
            found.append((row, row + 1))
    return tuple(found)


def _replay(node: Node, tensor: Tensor, index: int) -> Tensor | None:
    """Run a recorded view on another tensor; None where it needs more than that one tensor."""
    if node.function is None or sum(isinstance(a, Ref) for a in pytree.tree_leaves((node.args, node.kwargs))) != 1:
        return None
    swap: Any = pytree.tree_map_only(Ref, lambda _: tensor, (node.args, node.kwargs))
    swap[1].pop("dtype", None)
    function = torch.ops.aten.reshape.default if base(node.op) == "aten.view" else node.function
    output = function(*swap[0], **swap[1])
    made = output if isinstance(output, (tuple, list)) else [output]
    return made[index] if isinstance(made[index], Tensor) else None


def _weight(flow: Flow, projection: Step) -> tuple[str, int] | None:
    """The two-dimensional parameter of a projection, and its axis of output features."""
    width = flow.shape(projection.outputs[0])[-1]
    for value in projection.statics:
        names = flow.levels.parameters(value)
        shape = flow.trace.values[value].shape
        if len(names) != 1 or len(shape) != 2 or shape[1] != width:
            continue
        transposed = base(flow.trace.producer(value).op) in ("aten.t", "aten.transpose", "aten.permute")
        return next(iter(names)), 0 if transposed else 1
    return None
