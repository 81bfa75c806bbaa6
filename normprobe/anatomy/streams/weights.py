"""Which parameters read the stream into a branch, which write it back, and the scale on the branch."""

from __future__ import annotations

from functools import partial

from torch import nn

from normprobe.anatomy.attention.ops import scaling
from normprobe.anatomy.flow.ops import LIGHT, WEIGHTY, Role, base
from normprobe.anatomy.flow.steps import Flow, Step
from normprobe.anatomy.flow.walk import constant_factor, first_readers, light_chain, operand_factor
from normprobe.anatomy.norm_sites.graph_subject import StaticFunction
from normprobe.anatomy.norm_sites.reparametrizations import directions
from normprobe.anatomy.streams.copies import mixing
from normprobe.anatomy.streams.parts import Part, by_sigmoid, control, enters
from normprobe.anatomy.streams.writes import Write
from normprobe.errors import UnreadableAnatomyError
from normprobe.records import BranchScale

_ALL = frozenset(Role)
_UNWEIGHTED = _ALL - WEIGHTY
_OPEN = _UNWEIGHTED - {Role.NORM}
_SCALED = LIGHT | {Role.GATE}


def reads(flow: Flow, write: Write, part: Part) -> dict[int, tuple[str, ...]]:
    """Parameters of the first weighty steps on every way into the branch, by the ids of these steps.

    Weights that only make a factor count where they read what the branch reads: a router behind the branch's norm does.
    """
    region, mixes = _reading(flow, write, part), mixing(flow, part.core)
    found: dict[int, tuple[str, ...]] = {}
    todo, seen = [write.source], {write.source}
    while todo:
        for step in first_readers(flow, todo.pop(), region, _UNWEIGHTED, mixes):
            if step.parameters:
                found[step.id] = (*step.parameters, *_biases(flow, step, part))
                continue
            fresh = [v for v in step.outputs if v not in seen]
            seen.update(fresh)
            todo += fresh
    return found


def _reading(flow: Flow, write: Write, part: Part) -> frozenset[int]:
    """The branch without those ways of factors that do not begin with one of the norms it begins with, nor those of the
    gate on the trunk."""
    if write.way == "gated":
        return part.core
    mixes = mixing(flow, part.core)
    norms = [s for s in first_readers(flow, write.source, part.core, _OPEN, mixes) if s.role is Role.NORM]
    if not norms:
        return part.region
    live = {v for norm in norms for v in norm.outputs}
    kept = set(part.core)
    for index in sorted(part.region):
        if any(v in live for v in flow.steps[index].inputs):
            live.update(flow.steps[index].outputs)
            kept.add(index)
    return frozenset(kept)


def writers(flow: Flow, part: Part, model: nn.Module) -> tuple[str, ...]:
    """Parameters of the last weighty steps on every way out of the branch, and what is added behind them: those that
    scale what is written. Of a weight-normed weight that is the magnitude, not the direction."""
    hits: dict[int, Step] = {}
    todo, seen = [part.end], {part.end}
    while todo:
        step = flow.made_by(todo.pop())
        if step is None or step.id not in part.core:
            continue
        if step.parameters and (step.role in WEIGHTY or step.role is Role.SHIFT):
            hits[step.id] = step
        if step.role in _UNWEIGHTED or not step.parameters:
            fresh = [v for v in scaling(flow, step) if v not in seen]
            seen.update(fresh)
            todo += fresh
    found: list[str] = []
    for step in (hits[i] for i in sorted(hits)):
        idle = {p for v in step.statics for p in directions(model, flow, v)}
        found += [p for p in step.parameters if p not in idle]
    return tuple(dict.fromkeys(found))


def _biases(flow: Flow, step: Step, part: Part) -> list[str]:
    """Parameters that are added to the outputs of a weighty step, over views alone."""
    found: list[str] = []
    todo = list(step.outputs)
    while todo:
        for reader in flow.readers(todo.pop()):
            if reader.id in part.region and reader.role in (Role.MOVE, Role.SHIFT):
                found += reader.parameters
                todo += reader.outputs
    return found


def parameters(flow: Flow, part: Part) -> tuple[str, ...]:
    """Every parameter used between the read and the add."""
    return tuple(dict.fromkeys(p for i in sorted(part.region) for p in flow.steps[i].parameters))


def sum_factor(flow: Flow, write: Write) -> float:
    """The constant that everything reads the sum of trunk and branch through, as in (x + f(x)) / √2."""
    factor, value = 1.0, write.output
    while len(readers := flow.readers(value)) == 1 and readers[0].role in LIGHT and len(readers[0].inputs) == 1:
        known = constant_factor(flow, readers[0]) if readers[0].role is Role.SCALE else 1.0
        if known is None or len(readers[0].outputs) != 1:
            break
        factor, value = factor * known, readers[0].outputs[0]
    return factor


def branch_scale(flow: Flow, write: Write, part: Part, model: nn.Module, behind: float) -> BranchScale:
    """The factor between the branch's last norm or weights and its add, a constant times the one `behind` the add; a
    mere change of sign is none. Of a branch that is a sum it is the one that all summands have."""
    outer = behind * operand_factor(write.step, write.step.inputs[1 - write.trunk])
    for step in (flow.steps[i] for i in sorted(part.region)):  # in order of time, so that no long sum is read at once
        for value in step.inputs if step.role is Role.ADD else ():
            _summand(flow, write, part, value, model)
    return _scale(flow, write, part, part.end, model, abs(outer))


def _scale(flow: Flow, write: Write, part: Part, value: int, model: nn.Module, constant: float = 1.0) -> BranchScale:
    """The factor on the way to `value`, times `constant`."""
    found = BranchScale()
    while (step := flow.made_by(value)) is not None and step.id in part.region and step.role in _SCALED:
        factor = control(flow, step, write.source, part.region)
        if step.role is Role.GATE and (step.parameters or factor is None):
            break
        if factor is not None and write.way != "gated" and _excites(flow, step, factor, part):
            break
        if factor is not None:
            gated = write.way == "gated" or _is_gate(flow, write, part, factor)
            return BranchScale(kind="gate") if gated else found
        known = constant_factor(flow, step) if step.role is Role.SCALE else 1.0
        if known is not None:
            constant *= abs(known)
        elif step.parameters:
            found = _times(found, _learned(flow, step, model))
        if len(step.inputs) != 1:
            break
        value = step.inputs[0]
    if step is not None and step.role is Role.MATMUL and found.parameter in step.parameters:
        found = BranchScale()  # the scales of a quantised weight
    if constant != 1.0:
        found = _times(found, BranchScale(kind="constant", value=constant))
    joins = step is not None and (step.role is Role.ADD or base(step.node.op) in ("aten.sum", "aten.stack"))
    if step is None or not joins or found.kind != "none" or step.id not in part.region:
        return found
    own = [v for v in step.inputs if v == write.source or flow.producer.get(v) in part.region]
    summands = [_summand(flow, write, part, v, model) for v in own or step.inputs]  # others are of a parallel branch
    return summands[0] if len({s.kind for s in summands}) == 1 else found


def _summand(flow: Flow, write: Write, part: Part, value: int, model: nn.Module) -> BranchScale:
    """The factor on the way to a summand, told once for all sums that it is a part of."""
    key = ("summand", write.step.id, part.region, value)
    if key not in flow.memo:
        flow.memo[key] = _scale(flow, write, part, value, model)
    found: BranchScale = flow.memo[key]
    return found


def _times(found: BranchScale, more: BranchScale) -> BranchScale:
    """Two factors as one: learned if one of them is, per channel if one of them is; its value where both have one."""
    if found.kind == "none":
        return more
    value = None if found.value is None or more.value is None else found.value * more.value
    if more.kind == "constant":
        return found.model_copy(update={"value": value})
    return (
        found.model_copy(update={"value": value})
        if found.kind == "channel"
        else more.model_copy(update={"value": value})
    )


def _learned(flow: Flow, step: Step, model: nn.Module) -> BranchScale:
    """A learned factor: of channels where it differs along an axis that the branch already has; else one number, or
    one for each copy of the stream that the branch is written to."""
    name = step.parameters[-1]
    given = flow.shape(_unspread(flow, step.inputs[0]))[::-1]
    factors = [flow.shape(v)[::-1] for v in step.statics if flow.levels.parameters(v)]
    if any(many > 1 and wide > 1 for factor in factors for many, wide in zip(factor, given, strict=False)):
        return BranchScale(kind="channel", parameter=name)
    value = constant_factor(flow, step, partial(_now, flow, model))
    return BranchScale(kind="scalar", value=value, parameter=name)


def _unspread(flow: Flow, value: int) -> int:
    """The value of which `value` shows the same elements again and again."""
    while (step := flow.made_by(value)) is not None and base(step.node.op) == "aten.expand":
        value = step.inputs[0]
    return value


def _excites(flow: Flow, step: Step, factor: int, part: Part) -> bool:
    """Whether a factor was computed from what it multiplies (squeeze and excitation): then it is part of the branch."""
    (scaled,) = (v for v in step.inputs if v != factor)
    links = {link.value for link in light_chain(flow, scaled)}
    todo, seen = [factor], {factor}
    while todo:
        maker = flow.made_by(todo.pop())
        if maker is None or maker.id not in part.region:
            continue
        fresh = [v for v in maker.inputs if v not in seen]
        if links.intersection(fresh):
            return True
        seen.update(fresh)
        todo += fresh
    return False


def _now(flow: Flow, model: nn.Module, value: int) -> float | None:
    """The number that a value computed from parameters is with those that the model has; None on the meta device."""
    try:
        made = StaticFunction(model, flow.trace, flow.levels, value).now()
    except UnreadableAnatomyError:
        return None
    return None if made is None or not bool((made == made.flatten()[:1]).all()) else float(made.flatten()[0])


def _is_gate(flow: Flow, write: Write, part: Part, factor: int) -> bool:
    """Whether a factor is a gate: made by a sigmoid, or given by a condition from outside the branch."""
    return by_sigmoid(flow, factor) or enters(flow, factor, write.source, part.region)
