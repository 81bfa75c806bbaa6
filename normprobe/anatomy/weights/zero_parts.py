"""Parts of packed weights that are 0: rows whose outputs are taken apart from the others (the values of a fused q, k
and v)."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from normprobe.anatomy.flow.ops import Role, base, unmoved
from normprobe.anatomy.flow.replay import condensed, counted, replay
from normprobe.anatomy.flow.steps import Flow, Step, ref
from normprobe.capture.storage import held_tensor
from normprobe.records.parts import part_name

_PRODUCTS = {"aten.mm": (1, None), "aten.addmm": (2, 0), "aten.linear": (1, 2)}  # places of the weight and the bias
_TURNS = frozenset({"aten.t", "aten.transpose", "aten.permute"})


def zero_parts(model: nn.Module, flow: Flow) -> dict[int, str]:
    """The signals that are 0 because the rows of a weight that make them are, with the name of those rows: a run of
    outputs, of which the bias is 0 too, beside others that are not."""
    found: dict[int, str] = {}
    packed: dict[int, tuple[str, int, Tensor, Tensor]] = {}  # weight, axis of its outputs, which are 0, their numbers
    for step in flow.steps:
        if step.role is Role.MATMUL and len(step.outputs) == 1:
            told = _zero_rows(model, flow, step)
            if told is not None:
                packed[step.outputs[0]] = (*told, counted(flow.shape(step.outputs[0]), -1))
        elif step.role is Role.MOVE and len(step.inputs) == 1 and step.inputs[0] in packed:
            name, axis, zero, numbers = packed[step.inputs[0]]
            for place, value in enumerate(step.outputs):
                rows = replay(flow, step.node, numbers, place)
                if rows is None or bool((rows < 1).any()):
                    continue
                chosen = torch.unique(condensed(rows)).long() - 1
                run = slice(int(chosen[0]), int(chosen[-1]) + 1) if chosen.numel() else slice(0, 0)
                if run.stop - run.start == chosen.numel() > 0 and bool(zero[chosen].all()):
                    found[value] = part_name(name, [*[slice(None)] * axis, run])
                else:
                    packed[value] = name, axis, zero, rows
    return found


def _zero_rows(model: nn.Module, flow: Flow, step: Step) -> tuple[str, int, Tensor] | None:
    """The weight of a product, the axis of its outputs and which of them are 0, some but not all; else None."""
    name = base(step.node.op)
    if step.group is not None or name not in _PRODUCTS:
        return None
    at, beside = _PRODUCTS[name]
    weight = _parameter(model, flow, step, at)
    if weight is None or weight[1].dim() != 2:
        return None
    axis = 0 if weight[2] != (name == "aten.linear") else 1
    zero = weight[1].detach().select(1 - axis, 0) == 0
    if not bool(zero.any()):
        return None
    zero = (weight[1].detach() == 0).all(1 - axis)
    if beside is not None and len(step.node.args) > beside and ref(step.node.args[beside]) >= 0:
        bias = _parameter(model, flow, step, beside)
        zero = zero & (bias[1].detach() == 0) if bias is not None and bias[1].shape == zero.shape else zero & False
    return (weight[0], axis, zero.cpu()) if bool(zero.any()) and not bool(zero.all()) else None


def _parameter(model: nn.Module, flow: Flow, step: Step, place: int) -> tuple[str, Tensor, bool] | None:
    """The name of the parameter that an argument is, its values, and whether it is turned; None where it is none."""
    value = ref(step.node.args[place])
    if value < 0 or flow.levels.signal(value):
        return None
    maker, turned = flow.trace.producer(value), False
    while base(maker.op) in _TURNS and len(maker.inputs) == 1:
        turned, maker = not turned, flow.trace.producer(maker.inputs[0])
    if maker.op != "parameter" or maker is not flow.trace.producer(unmoved(flow.trace, value)):
        return None
    held = held_tensor(model, maker.name)
    plain = type(held) is nn.Parameter and not held.is_meta and held.is_floating_point() and held.numel() > 0
    return (maker.name, held, turned) if plain else None
