"""What the optimiser does to the norms: which of them decay, and whose steps are lost in rounding."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from normprobe.capture.parts import Parts
from normprobe.measures.optimizer_trial import (
    apart,
    followed_steps,
    full_rate,
    group_of,
    keeps_rounded,
    lost,
    step_of_one,
)
from normprobe.measures.values import plain
from normprobe.records import Anatomy, NormSite
from normprobe.records.optimizer import NormStep, OptimizerGroup, OptimizerMeasure
from normprobe.records.parts import whole

_Use = tuple[NormSite, str, Literal["gain", "offset"]]
_NONE: Mapping[str, Tensor] = {}


def measure_optimizer(
    model: nn.Module, anatomy: Anatomy, optimizer: Optimizer, gradients: Mapping[str, Tensor] = _NONE
) -> OptimizerMeasure:
    """Weight decay and step of every gain and offset that `optimizer` trains.

    Nothing of the model runs, and the optimiser is left as it is: copies of it step parameters of their own.

    Args:
        model: the model that `anatomy` was read from.
        anatomy: its norms.
        optimizer: any optimiser of torch's interface, made for the parameters of `model`.
        gradients: of a loss by the parameters `trained` names, which tell steps that follow the size of the gradient.
    """
    parameters = Parts(dict(model.named_parameters(remove_duplicate=False)))
    held = {id(p): index for index, group in enumerate(optimizer.param_groups) for p in group["params"]}
    own = {id(p) for p in parameters.values()}
    uses = list(_uses(anatomy, parameters))
    names = set(parameters)
    stepped = [(use, held[key]) for use in uses if (key := id(parameters[whole(use[1], names)])) in held]
    with apart(model, optimizer):
        trial = _Trial(optimizer, tuple(_groups(optimizer)), Parts(gradients))
        norms = tuple(trial.step(use, parameters[use[1]], group) for use, group in stepped)
    return OptimizerMeasure(
        name=type(optimizer).__name__,
        groups=trial.groups,
        norms=norms,
        gains=sum(part == "gain" for _, _, part in uses),
        offsets=sum(part == "offset" for _, _, part in uses),
        foreign=sum(one not in own for one in held),
    )


def trained(model: nn.Module, anatomy: Anatomy) -> frozenset[str]:
    """The names of the gains and offsets that need a gradient."""
    parameters = Parts(dict(model.named_parameters(remove_duplicate=False)))
    return frozenset(whole(name, set(parameters)) for _, name, _ in _uses(anatomy, parameters))


def _groups(optimizer: Optimizer) -> Iterator[OptimizerGroup]:
    for group in optimizer.param_groups:
        yield group_of(optimizer, full_rate(group), _device(group["params"]))


def _device(parameters: list[Tensor]) -> torch.device:
    device = parameters[0].device if parameters else torch.device("cpu")
    return torch.device("cpu") if device.type == "meta" else device


def _uses(anatomy: Anatomy, parameters: Mapping[str, Tensor]) -> Iterator[_Use]:
    """Gains and offsets that need a gradient, each once."""
    seen: set[tuple[int, str]] = set()
    names = set(parameters)
    for norm in anatomy.norms:
        pairs: tuple[tuple[str | None, Literal["gain", "offset"]], ...]
        pairs = (norm.weight, "gain"), (norm.bias, "offset")
        for name, part in pairs:
            if name is None or name not in parameters:
                continue
            of = whole(name, names)
            held, key = parameters[of], (id(parameters[of]), name.removeprefix(of))
            if norm.executed and held.requires_grad and key not in seen:
                seen.add(key)
                yield norm, name, part


@dataclass(frozen=True)
class _Trial:
    """Copies of an optimiser on the gains and offsets of norms."""

    optimizer: Optimizer
    groups: tuple[OptimizerGroup, ...]
    gradients: Mapping[str, Tensor]
    keeps: dict[tuple[int, torch.dtype], bool] = field(default_factory=dict)

    def step(self, use: _Use, parameter: Tensor, index: int) -> NormStep:
        """What the group `index` does to one gain or offset."""
        norm, name, part = use
        size, share = self._lost(name, parameter, index) if plain(parameter) else (None, None)
        return NormStep(
            path=norm.path,
            parameter=name,
            part=part,
            one_plus=part == "gain" and norm.affine.startswith("one_plus"),
            group=index,
            dtype=str(parameter.dtype).removeprefix("torch."),
            step=size,
            lost=share,
        )

    def _lost(self, name: str, parameter: Tensor, index: int) -> tuple[float | None, float | None]:
        """The size of a step, and the share of the elements that it leaves as they are; None where it is not known."""
        known, group = self.groups[index], full_rate(self.optimizer.param_groups[index])
        steps: Tensor | None = None
        if known.step:
            steps = torch.full_like(parameter, known.step, dtype=torch.float64)
        elif known.decay is not None and name in self.gradients:
            steps = followed_steps(self.optimizer, group, parameter, self.gradients[name])
        if steps is None or not bool((steps > 0).any()):
            return None, None
        size = float(steps[steps > 0].median())
        return size, 0.0 if self._keeps(index, parameter) else lost(parameter, steps)

    def _keeps(self, index: int, parameter: Tensor) -> bool:
        """Whether what is rounded away in the dtype of a parameter is kept."""
        key = index, parameter.dtype
        if key not in self.keeps:
            group = full_rate(self.optimizer.param_groups[index])
            step = self.groups[index].step or step_of_one(self.optimizer, group, parameter.device)
            self.keeps[key] = keeps_rounded(self.optimizer, group, parameter.dtype, step, parameter.device)
        return self.keeps[key]
