"""Weights that are computed from other parameters at every forward, told by how they react to a change of those."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from normprobe.anatomy.flow.levels import Levels
from normprobe.anatomy.flow.ops import Role, base
from normprobe.anatomy.flow.statics import Statics
from normprobe.anatomy.flow.steps import Flow
from normprobe.anatomy.norm_sites.graph_subject import StaticFunction
from normprobe.capture.recorder import record
from normprobe.capture.trace import Trace
from normprobe.errors import UnreadableAnatomyError
from normprobe.records import Reparametrization

Kind = Literal["weight_norm", "spectral_norm", "weight_standardization"]
_CLOSE = 1e-6
_LARGE = 1e4  # parameters this large make an eps beside their norm negligible


def find_reparametrizations(model: nn.Module, flow: Flow) -> tuple[Reparametrization, ...]:
    """Weight norm (Salimans & Kingma 2016), spectral norm (Miyato et al. 2018) and weight standardisation (Qiao et al.
    2019) of every weight that a product or convolution uses; `path` is the module in which it is used."""
    found: dict[str, Reparametrization] = {}
    for step in flow.steps:
        if step.role is not Role.MATMUL:
            continue
        for value in step.statics:
            path = flow.path(step)
            made = _computed(flow, value) if path not in found else None
            if made is not None:
                kind = _kind(model, flow, made)
                if kind is not None:
                    found[path] = Reparametrization(path=path, kind=kind)
    return tuple(found.values())


def find_unused_reparametrizations(model: nn.Module, trace: Trace) -> tuple[Reparametrization, ...]:
    """The like for parametrised modules that did not run: their weights are computed once, under the recorder."""
    ran = {call.path for call in trace.calls}
    found = []
    for path, module in model.named_modules():
        if path in ran or not parametrize.is_parametrized(module):
            continue
        for name in module.parametrizations:
            reader = _Read(module, name)
            read = record(reader, ())
            flow = Flow(read, Levels(read), Statics(reader, read))
            kind = _kind(reader, flow, read.outputs[0][1])
            if kind is not None:
                found.append(Reparametrization(path=path, kind=kind))
    return tuple(found)


class _Read(nn.Module):
    """Returns one computed tensor of a module."""

    def __init__(self, module: nn.Module, name: str) -> None:
        super().__init__()
        self.module, self.name = module, name

    def forward(self) -> Tensor:
        tensor: Tensor = getattr(self.module, self.name)
        return tensor


def _computed(flow: Flow, value: int) -> int | None:
    """The value behind the views of a static operand, if it was made from parameters by more than views of one."""
    while flow.levels.parameters(value):
        node = flow.trace.producer(value)
        if node.op == "parameter":
            return None
        if not getattr(node.function, "is_view", False) and base(node.op) not in (
            "aten._to_copy",
            "aten.clone",
        ):
            return value if len(flow.trace.values[value].shape) > 1 else None
        value = node.inputs[0]
    return None


def directions(model: nn.Module, flow: Flow, value: int) -> tuple[str, ...]:
    """The parameters of a computed weight that do not set its scale because another one does (weight norm's v beside
    its g); none for a plain weight."""
    made = _computed(flow, value)
    if made is None:
        return ()
    try:
        function = StaticFunction(model, flow.trace, flow.levels, made)
    except UnreadableAnatomyError:
        return ()
    with torch.no_grad():
        start = _start(function)
        weight = function(start)
        names = [n for n in start if n in function.parameters]
        if not any(_gains(function, start, n, weight) for n in names):
            return ()
        return tuple(n for n in names if _idle(function, start, n, weight))


def _start(function: StaticFunction) -> dict[str, Tensor]:
    values = function.start(seed=1)
    return {n: t * (_LARGE if n in function.parameters else 1.0) for n, t in values.items()}


def _idle(function: StaticFunction, start: dict[str, Tensor], name: str, weight: Tensor) -> bool:
    return _same(function(start | {name: 3.0 * start[name]}), weight)


def _gains(function: StaticFunction, start: dict[str, Tensor], name: str, weight: Tensor) -> bool:
    return _same(function(start | {name: 3.0 * start[name]}), 3.0 * weight)


def _kind(model: nn.Module, flow: Flow, value: int) -> Kind | None:
    try:
        function = StaticFunction(model, flow.trace, flow.levels, value)
    except UnreadableAnatomyError:
        return None
    with torch.no_grad():
        start = _start(function)
        weight = function(start)
        for name in start:
            if name in function.parameters and _idle(function, start, name, weight) and _follows(weight, start[name]):
                return _invariant_kind(function, start, name, weight)
    return None


def _follows(weight: Tensor, direction: Tensor) -> bool:
    """Whether `weight` is `direction` but for a shift and a factor for each slice along some axis; a product of two
    parameters (queries made from normed latents, say) is not."""
    if weight.numel() != direction.numel() or weight.numel() == 0:
        return False
    turned = weight.shape != direction.shape and weight.shape == direction.shape[::-1]
    weight = (weight.mT if turned else weight).reshape(direction.shape)
    pairs = [(weight.reshape(1, -1), direction.reshape(1, -1))]
    pairs += [(weight.movedim(i, 0).flatten(1), direction.movedim(i, 0).flatten(1)) for i in range(weight.dim())]
    for a, b in pairs:
        a, b = a - a.mean(1, keepdim=True), b - b.mean(1, keepdim=True)
        if bool(((a * b).sum(1).abs() >= (1 - _CLOSE) * a.norm(dim=1) * b.norm(dim=1)).all()):
            return True
    return False


def _invariant_kind(function: StaticFunction, start: dict[str, Tensor], name: str, weight: Tensor) -> Kind:
    """The kind of a weight that does not change with the scale of parameter `name`, which it follows."""
    shifted = function(start | {name: start[name] + 0.5 * _LARGE})
    if _same(shifted, weight):
        return "weight_standardization"
    gains = [n for n in start if n in function.parameters and n != name]
    if any(_gains(function, start, gain, weight) for gain in gains):
        return "weight_norm"
    if weight.shape != start[name].shape:
        return "weight_norm"
    ratio = weight.reshape(-1) / start[name].reshape(-1)
    return "spectral_norm" if _same(ratio, ratio[0].expand_as(ratio)) else "weight_norm"


def _same(a: Tensor, b: Tensor) -> bool:
    return bool((a - b).abs().amax() <= _CLOSE * b.abs().amax().clamp_min(1e-30))
