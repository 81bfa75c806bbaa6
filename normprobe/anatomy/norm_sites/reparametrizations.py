"""Weights that are computed from other parameters at every forward, told by how they react to a change of those."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations
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
_SMALL = 1e-20  # and those this small are negligible beside it


def find_reparametrizations(model: nn.Module, flow: Flow) -> tuple[Reparametrization, ...]:
    """Weight norm (Salimans & Kingma 2016), spectral norm (Miyato et al. 2018) and weight standardisation (Qiao et al.
    2019) of every weight that a product or convolution uses; `path` is the module in which it is used."""
    read: dict[tuple[str, int], Reparametrization | None] = {}
    for step in (s for s in flow.steps if s.role is Role.MATMUL):
        for value in step.statics:
            made, path = _computed(flow, value), flow.path(step)
            if made is not None and (path, made) not in read:
                read[path, made] = _read(model, flow, made, path)
    found = [one for one in read.values() if one is not None]
    return tuple({(one.path, one.parameter): one for one in found}.values())


def find_unused_reparametrizations(model: nn.Module, trace: Trace) -> tuple[Reparametrization, ...]:
    """The like for parametrised modules that did not run: their weights are computed once, under the recorder."""
    ran = {call.path for call in trace.calls}
    found = []
    for path, module in model.named_modules():
        if path in ran or not parametrize.is_parametrized(module):
            continue
        for name in module.parametrizations:
            reader = _Reader(module, name)
            seen = record(reader, ())
            flow = Flow(seen, Levels(seen), Statics(reader, seen))
            one = _read(reader, flow, seen.outputs[0][1], path)
            if one is not None:
                gain = None if one.gain is None else _renamed(one.gain, path)
                found.append(one.model_copy(update={"parameter": _renamed(one.parameter, path), "gain": gain}))
    return tuple(found)


def _renamed(name: str, path: str) -> str:
    """The model's name of a parameter that a `_Reader` of the module at `path` holds."""
    return f"{path}.{name.removeprefix('module.')}"


class _Reader(nn.Module):
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
    key = "directions", function.recipe()
    if key not in flow.memo:
        flow.memo[key] = tuple(map(function.names.index, _directions(function)))
    return tuple(function.names[i] for i in flow.memo[key])


@torch.no_grad()
def _directions(function: StaticFunction) -> tuple[str, ...]:
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


def _read(model: nn.Module, flow: Flow, value: int, path: str) -> Reparametrization | None:
    """What kind of computed weight `value` is; None where it is of none that is known."""
    try:
        function = StaticFunction(model, flow.trace, flow.levels, value)
    except UnreadableAnatomyError:
        return None
    key = "computed weight", function.recipe()
    if key not in flow.memo:
        flow.memo[key] = function.names, _described(function)
    names, one = flow.memo[key]
    if one is None:
        return None
    own = dict(zip(names, function.names, strict=True))
    gain = None if one.gain is None else own[one.gain]
    renamed: Reparametrization = one.model_copy(update={"path": path, "parameter": own[one.parameter], "gain": gain})
    return renamed


@torch.no_grad()
def _described(function: StaticFunction) -> Reparametrization | None:
    """The weight that `function` computes, without its path."""
    start = _start(function)
    weight = function(start)
    for name in start:
        if name in function.parameters and _idle(function, start, name, weight) and _follows(weight, start[name]):
            break
    else:
        return None
    own, others = start[name], [n for n in start if n in function.parameters and n != name]
    gain = next((n for n in others if _gains(function, start, n, weight)), None)
    kind = _invariant_kind(function, start, name, weight, gained=gain is not None)
    axes = tuple(i for i in range(own.dim()) if not _same(function(start | {name: own * _steps(own, i)}), weight))
    return Reparametrization(
        path="",
        kind=kind,
        parameter=name,
        gain=gain,
        axes=axes,
        floor=_floor(function, start, name, own / size_of(own, axes, kind)),
        zeros=bool(function(start | {name: torch.zeros_like(own)}).isfinite().all()),
    )


def size_of(tensor: Tensor, axes: Sequence[int], kind: Kind) -> Tensor:
    """The size of every slice behind a computed weight (`Reparametrization`), in its dtype and with its axes kept."""
    if not axes:
        return torch.zeros_like(tensor) if kind == "weight_standardization" else tensor.abs()
    if kind == "weight_standardization":
        return tensor.std(dim=tuple(axes), correction=0, keepdim=True)
    norms: Tensor = torch.linalg.vector_norm(tensor, dim=tuple(axes), keepdim=True)
    return norms


def _steps(tensor: Tensor, axis: int) -> Tensor:
    """A factor for each slice along `axis`, no two alike."""
    shape = [-1 if i == axis else 1 for i in range(tensor.dim())]
    return torch.linspace(0.5, 2.0, tensor.shape[axis], dtype=tensor.dtype).reshape(shape)


def _floor(function: StaticFunction, start: dict[str, Tensor], name: str, unit: Tensor) -> float | None:
    """What the slices of `unit`, all of size 1, are divided by where they are made very small; None where it is their
    own size even then."""
    whole, small = (function(start | {name: unit * size}).abs().amax() for size in (_LARGE, _SMALL))
    share = float(small / whole)
    return _SMALL / share if 0 < share < 0.5 else None


def _follows(weight: Tensor, direction: Tensor) -> bool:
    """Whether `weight` is `direction` but for a shift and a factor for each slice along some axis, or two (experts, and
    the outputs of each); a product of two parameters (queries made from normed latents, say) is not."""
    if weight.numel() != direction.numel() or weight.numel() == 0:
        return False
    turned = weight.shape != direction.shape and weight.shape == direction.shape[::-1]
    weight = (weight.mT if turned else weight).reshape(direction.shape)
    pairs = [(weight.reshape(1, -1), direction.reshape(1, -1))]
    pairs += [(weight.movedim(i, 0).flatten(1), direction.movedim(i, 0).flatten(1)) for i in range(weight.dim())]
    for both in combinations(range(weight.dim()), 2) if weight.dim() > 2 else ():
        a, b = (t.movedim(both, (0, 1)).flatten(2).flatten(0, 1) for t in (weight, direction))
        pairs += [(a, b)] if a.shape[1] > 2 else []  # any two numbers are a shift and a factor of any other two
    for a, b in pairs:
        a, b = a - a.mean(1, keepdim=True), b - b.mean(1, keepdim=True)
        if bool(((a * b).sum(1).abs() >= (1 - _CLOSE) * a.norm(dim=1) * b.norm(dim=1)).all()):
            return True
    return False


def _invariant_kind(
    function: StaticFunction, start: dict[str, Tensor], name: str, weight: Tensor, gained: bool
) -> Kind:
    """The kind of a weight that does not change with the scale of parameter `name`, which it follows."""
    far = 2 * start[name].abs().amax()  # either way, so that signs change: of a single element w/|w| is its sign
    if all(_same(function(start | {name: start[name] + shift}), weight) for shift in (far, -far)):
        return "weight_standardization"
    if gained or weight.shape != start[name].shape:
        return "weight_norm"
    ratio = weight.reshape(-1) / start[name].reshape(-1)
    return "spectral_norm" if _same(ratio, ratio[0].expand_as(ratio)) else "weight_norm"


def _same(a: Tensor, b: Tensor) -> bool:
    return bool((a - b).abs().amax() <= _CLOSE * b.abs().amax().clamp_min(1e-30))
