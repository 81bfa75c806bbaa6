"""What the optimiser does to the norms: which of them decay, and whose steps are lost in rounding."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Literal

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from normprobe.measures.optimizer_trial import full_rate, group_of, keeps_rounded, lost
from normprobe.measures.values import plain
from normprobe.records import Anatomy, NormSite
from normprobe.records.optimizer import NormStep, OptimizerGroup, OptimizerMeasure

_Use = tuple[NormSite, str, Literal["gain", "offset"]]


def measure_optimizer(model: nn.Module, anatomy: Anatomy, optimizer: Optimizer) -> OptimizerMeasure:
    """Weight decay and step of every gain and offset that `optimizer` trains.

    Nothing of the model runs, and the optimiser is left as it is: copies of it step parameters of their own.

    Args:
        model: the model that `anatomy` was read from.
        anatomy: its norms.
        optimizer: any optimiser of torch's interface, made for the parameters of `model`.
    """
    parameters = dict(model.named_parameters(remove_duplicate=False))
    held = {id(p): index for index, group in enumerate(optimizer.param_groups) for p in group["params"]}
    own = {id(p) for p in parameters.values()}
    uses = list(_uses(anatomy, parameters))
    groups = tuple(_groups(optimizer))
    norms = tuple(_steps(uses, parameters, held, groups, optimizer))
    return OptimizerMeasure(
        name=type(optimizer).__name__,
        groups=groups,
        norms=norms,
        gains=sum(part == "gain" for _, _, part in uses),
        offsets=sum(part == "offset" for _, _, part in uses),
        foreign=sum(one not in own for one in held),
    )


def _groups(optimizer: Optimizer) -> Iterator[OptimizerGroup]:
    for group in optimizer.param_groups:
        yield group_of(optimizer, full_rate(group), _device(group["params"]))


def _device(parameters: list[Tensor]) -> torch.device:
    device = parameters[0].device if parameters else torch.device("cpu")
    return torch.device("cpu") if device.type == "meta" else device


def _uses(anatomy: Anatomy, parameters: Mapping[str, Tensor]) -> Iterator[_Use]:
    """Gains and offsets that need a gradient, each once."""
    seen: set[int] = set()
    for norm in anatomy.norms:
        pairs: tuple[tuple[str | None, Literal["gain", "offset"]], ...]
        pairs = (norm.weight, "gain"), (norm.bias, "offset")
        for name, part in pairs:
            if name is None or name not in parameters or id(parameters[name]) in seen:
                continue
            if norm.executed and parameters[name].requires_grad:
                seen.add(id(parameters[name]))
                yield norm, name, part


def _steps(
    uses: list[_Use],
    parameters: Mapping[str, Tensor],
    held: Mapping[int, int],
    groups: tuple[OptimizerGroup, ...],
    optimizer: Optimizer,
) -> Iterator[NormStep]:
    keeps: dict[tuple[int, torch.dtype], bool] = {}
    for norm, name, part in uses:
        parameter = parameters[name]
        index = held.get(id(parameter))
        if index is None:
            continue
        step, share = groups[index].step, None
        if step and plain(parameter):
            key = index, parameter.dtype
            if key not in keeps:
                group = full_rate(optimizer.param_groups[index])
                keeps[key] = keeps_rounded(optimizer, group, parameter.dtype, step, parameter.device)
            share = 0.0 if keeps[key] else lost(parameter, step)
        yield NormStep(
            path=norm.path,
            parameter=name,
            part=part,
            one_plus=part == "gain" and norm.affine.startswith("one_plus"),
            group=index,
            dtype=str(parameter.dtype).removeprefix("torch."),
            lost=share,
        )
