"""From a query, key or value back to the projection it comes from: norm, rotary embedding, scale, views."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch

from normprobe.anatomy.attention.bounded import NONE, Learned
from normprobe.anatomy.flow.levels import Level
from normprobe.anatomy.flow.ops import LIGHT, WEIGHTY, Role, base
from normprobe.anatomy.flow.replay import condensed, sent
from normprobe.anatomy.flow.steps import Flow, Step
from normprobe.anatomy.flow.walk import backward, constant_factor

_MIXING = LIGHT | {Role.ADD, Role.GATE}
_KEEPING_SCALE = frozenset({"aten.clamp", "aten.clamp_", "aten.hardtanh", "aten.mean"})  # clipped, or landmarks' means
_TIMES = frozenset({"aten.mul", "aten.mul_"})


@dataclass
class Side:
    """What lies between one operand of attention and its projection.

    `factor` is the constant that the operand was multiplied by (None: not constant); `mixed` says that a rotary
    embedding (or another mixing of features) was passed; `norm_after_mix` that the norm comes after it.
    """

    factor: float | None = 1.0
    learned: Learned = NONE
    norms: tuple[Step, ...] = ()
    mixed: bool = False
    norm_after_mix: bool = False
    projection: Step | None = None
    moves: list[tuple[Step, int]] = field(default_factory=list)  # steps that move tokens or features, which output


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
    if base(step.node.op) in _KEEPING_SCALE:
        side.moves += [(step, 0)] if step.role is Role.POOL else []
        return step.inputs[0]
    if step.role in _MIXING:
        origin, norms = _single_origin(flow, value)
        if origin is not None and math.prod(flow.shape(origin)) == math.prod(flow.shape(value)):
            if norms and not side.norms:  # heads split apart, normed one by one, put together again
                side.norms, side.norm_after_mix = tuple(norms[::-1]), not side.mixed
            side.mixed = side.mixed or not norms
            return origin
    if step.role is Role.MOVE:
        _join(side, [trace_side(flow, v) for v in step.inputs])
    return None


def _join(side: Side, parts: list[Side]) -> None:
    """Note what parts that stand side by side (the tokens of two streams, say) have in common; no one projection is
    theirs."""
    factor = parts[0].factor if len({part.factor for part in parts}) == 1 else None
    side.factor = None if side.factor is None or factor is None else side.factor * factor
    if not side.norms and all(part.norms for part in parts):
        side.norms = tuple(norm for part in parts for norm in part.norms)
        side.norm_after_mix = not side.mixed and not any(p.mixed and not p.norm_after_mix for p in parts)
    side.mixed = side.mixed or all(part.mixed for part in parts)


def _scale(flow: Flow, step: Step, side: Side) -> int:
    if flow.trace.values[step.outputs[0]].dtype.is_complex:  # features in pairs are turned: a rotary embedding
        side.mixed = True
    elif step.role is Role.SCALE:
        constant = constant_factor(flow, step)
        if constant is None and not step.parameters and _unit_scale(flow, step):
            constant = 1.0
        constant = _picked(flow, step, side) if constant is None else constant
        side.factor = None if side.factor is None or constant is None else side.factor * constant
        side.learned = side.learned.times(flow, step)
    return step.inputs[0]


def _picked(flow: Flow, step: Step, side: Side) -> float | None:
    """The one number that a known factor, which differs between features, is on those that the operand is made of:
    queries among the output of one projection may have a factor of their own."""
    known = [v for v in step.statics if flow.levels.of[v] is Level.STATIC and not flow.levels.parameters(v)]
    factor = flow.statics.tensor(known[0]) if len(known) == 1 and base(step.node.op) in _TIMES else None
    if factor is None or len(step.statics) != 1 or not factor.is_floating_point():
        return None
    moves = [(move.node, place) for move, place in reversed(side.moves)]
    numbers = sent(flow, moves, factor.expand(flow.shape(step.outputs[0])))
    found = [] if numbers is None else torch.unique(condensed(numbers)).tolist()
    return float(found[0]) if len(found) == 1 else None


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
