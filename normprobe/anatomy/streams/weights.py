"""Which parameters read the stream into a branch, which write it back, and the scale on the branch."""

from __future__ import annotations

from torch import nn

from normprobe.anatomy.flow.ops import WEIGHTY, Role
from normprobe.anatomy.flow.steps import Flow, Step
from normprobe.anatomy.flow.walk import constant_factor, first_readers, last_makers, light_chain, operand_factor
from normprobe.anatomy.norm_sites.reparametrizations import directions
from normprobe.anatomy.streams.adds import Part, Write
from normprobe.records import BranchScale

_ALL = frozenset(Role)
_UNWEIGHTED = _ALL - WEIGHTY


def readers(flow: Flow, write: Write, part: Part) -> tuple[str, ...]:
    """Parameters of the first weighty steps on every way into the branch."""
    found: list[str] = []
    todo, seen = [write.source], {write.source}
    while todo:
        for step in first_readers(flow, todo.pop(), part.region, _UNWEIGHTED):
            if step.parameters:
                found += (*step.parameters, *_biases(flow, step, part))
                continue
            fresh = [v for v in step.outputs if v not in seen]
            seen.update(fresh)
            todo += fresh
    return tuple(dict.fromkeys(found))


def writers(flow: Flow, part: Part, model: nn.Module) -> tuple[str, ...]:
    """Parameters of the last weighty steps on every way out of the branch: those that scale what is written. Of a
    weight-normed weight that is the magnitude, not the direction."""
    found = _biases_behind(flow, part)
    todo, seen = [part.end], {part.end}
    while todo:
        for step in last_makers(flow, todo.pop(), part.region, _UNWEIGHTED):
            if step.parameters:
                idle = {p for v in step.statics for p in directions(model, flow, v)}
                found += [p for p in step.parameters if p not in idle]
                continue
            fresh = [v for v in step.inputs if v not in seen]
            seen.update(fresh)
            todo += fresh
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


def _biases_behind(flow: Flow, part: Part) -> list[str]:
    """Parameters that are added between the last weights and the branch's end."""
    found: list[str] = []
    for link in light_chain(flow, part.end):
        step = flow.made_by(link.value)
        if step is not None and step.id in part.region and step.role is Role.SHIFT:
            found += step.parameters
    return found


def parameters(flow: Flow, part: Part) -> tuple[str, ...]:
    """Every parameter used between the read and the add."""
    return tuple(dict.fromkeys(p for i in sorted(part.region) for p in flow.steps[i].parameters))


def branch_scale(flow: Flow, write: Write, part: Part, model: nn.Module) -> BranchScale:
    """The factor between the branch's last norm or weights and its add; a mere change of sign is none."""
    constant, found = abs(operand_factor(write.step, write.step.inputs[1 - write.trunk])), BranchScale()
    step = None
    for link in light_chain(flow, part.end):
        step = flow.made_by(link.value)
        if step is None or step.id not in part.region:
            break
        if step.role is Role.GATE and not step.parameters:
            return BranchScale(kind="gate") if _learned_gate(flow, step) else found
        if step.role is not Role.SCALE:
            continue
        factor = constant_factor(flow, step)
        if factor is not None:
            constant *= abs(factor)
        elif step.parameters:
            found = _learned(step, model)
    if step is not None and step.role is Role.MATMUL and found.parameter in step.parameters:
        found = BranchScale()  # the scales of a quantised weight
    if found.kind == "none" and constant != 1.0:
        return BranchScale(kind="constant", value=constant)
    return found


def _learned(step: Step, model: nn.Module) -> BranchScale:
    name = step.parameters[-1]
    parameter = model.get_parameter(name)
    if parameter.numel() > 1:
        return BranchScale(kind="channel", parameter=name)
    value = None if parameter.device.type == "meta" else parameter.detach().item()
    return BranchScale(kind="scalar", value=value, parameter=name)


def _learned_gate(flow: Flow, step: Step) -> bool:
    """Whether one factor of a product is a gate: one value or channel vector for each token by way of a sigmoid."""
    makers = [flow.made_by(v) for v in step.inputs]
    return any(m is not None and m.role is Role.ACT and "sigmoid" in m.node.op for m in makers)
