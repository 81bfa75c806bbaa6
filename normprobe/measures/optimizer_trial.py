"""Steps of a copy of an optimiser on a parameter of our own: what it does, without a trace in the original."""

from __future__ import annotations

import math
from collections import OrderedDict, defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from normprobe.capture.guard import untouched
from normprobe.records.optimizer import OptimizerGroup

_HOOKS = "_optimizer_step_pre_hooks", "_optimizer_step_post_hooks"
_SMALL, _LARGE = 1e-3, 1.0  # two gradients; steps that follow them differ by a thousand
_SAME = 0.1
_STEPS, _AWAY = 64, 4.0
_MANY = 20  # steps after which a momentum of 0.9 has grown to nine tenths of what it becomes


@contextmanager
def apart(model: nn.Module, optimizer: Optimizer) -> Iterator[None]:
    """While open no parameter of the model or of the optimiser has a gradient, and what is written into them or into
    what the optimiser holds is undone at the end: copies may reach an optimiser that could not be copied (in an object,
    behind a function), whose steps then find nothing to follow."""
    both: Any = nn.Module()
    both.model, both.optimizer = model, optimizer
    own = {id(p): p for group in optimizer.param_groups for p in group["params"]}
    gradients = [(p, p.grad) for p in ({id(p): p for p in model.parameters()} | own).values()]
    with untouched(both) as keeper, keeper.mode():
        try:
            for parameter, _ in gradients:
                parameter.grad = None
            yield
        finally:
            for parameter, gradient in gradients:
                parameter.grad = gradient


def stepped(
    optimizer: Optimizer, group: Mapping[str, Any], start: Tensor, gradient: float | Tensor, steps: int = 1
) -> Tensor:
    """`start` after some steps of a copy of `optimizer` under the settings of `group`, every gradient the same: one
    number for all elements, or a tensor of its shape.

    The copy has a state and a group of its own, and none of the hooks; optimisers that the original holds and steps
    are copied so too. What else it holds is shared.
    """
    parameter = torch.nn.Parameter(start.clone())
    copy = _copied(optimizer, [{**group, "params": [parameter]}])
    for _ in range(steps):
        parameter.grad = gradient.clone() if isinstance(gradient, Tensor) else torch.full_like(parameter, gradient)
        type(optimizer).step(copy)  # that of the class: a schedule puts its own into the original
    return parameter.detach()


def _copied(value: Any, groups: list[dict[str, Any]]) -> Any:
    """`value` with every optimiser in it as a copy that steps `groups`."""
    if isinstance(value, (list, tuple)) and any(isinstance(one, Optimizer) for one in value):
        return [_copied(one, groups) for one in value]
    if not isinstance(value, Optimizer):
        return value
    copy = object.__new__(type(value))
    held = {name: _copied(one, groups) for name, one in vars(value).items()}
    copy.__dict__.update(held, state=defaultdict(dict), param_groups=groups, **{name: OrderedDict() for name in _HOOKS})
    return copy


def group_of(optimizer: Optimizer, group: Mapping[str, Any], device: torch.device) -> OptimizerGroup:
    """What one step of `optimizer` does to elements of 1 in `group`."""
    said = {"lr": _number(group.get("lr")), "weight_decay": _number(group.get("weight_decay"))}
    one = torch.ones(8, device=device)
    try:
        idle = float((one - stepped(optimizer, group, one, 0.0)).abs().mean())
        bare = _bare(group)
        small, large = (float((one - stepped(optimizer, bare, one, each)).abs().mean()) for each in (_SMALL, _LARGE))
    except Exception as error:  # whatever an optimiser raises that needs more than gradients
        reason = (
            f"a copy of it does not step: {type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
        )
        return OptimizerGroup(**said, decay=None, step=None, reason=reason)
    bounded = large > 0 and abs(large - small) <= _SAME * large
    why = "" if bounded else _why_none(idle, large, said["lr"])
    known = math.isfinite(idle) and (large != 0 or said["lr"] == 0)
    return OptimizerGroup(**said, decay=idle if known else None, step=large if bounded else None, reason=why)


def _why_none(idle: float, large: float, lr: float | None) -> str:
    """Why the size of a step is not known, of a copy that moves an element by `idle` where its gradient is 0 and by
    `large` where it is 1."""
    if not math.isfinite(idle + large):
        return "the step of a copy of it is not finite"
    if large == 0:
        return "its learning rate is 0" if lr == 0 else "a copy of it does not move the parameter that it is given"
    return 'the size of its steps follows the gradient, which level "backward" measures'


def keeps_rounded(optimizer: Optimizer, group: Mapping[str, Any], dtype: torch.dtype, step: float, at: Any) -> bool:
    """Whether steps of a quarter of what rounding takes in `dtype` add up to a change all the same."""
    power = math.floor(math.log2(2 * _AWAY * step / torch.finfo(dtype).eps))
    start = torch.full((64,), 2.0**power, dtype=dtype, device=at)
    return bool((stepped(optimizer, _bare(group), start, _LARGE, _STEPS) != start).any())


def step_of_one(optimizer: Optimizer, group: Mapping[str, Any], device: torch.device) -> float:
    """Size of the steps of an element of 1 whose gradient is 1."""
    one = torch.ones(8, device=device)
    return float(followed_steps(optimizer, group, one, one * _LARGE).mean())


def followed_steps(optimizer: Optimizer, group: Mapping[str, Any], stored: Tensor, gradient: Tensor) -> Tensor:
    """Sizes of the steps that a gradient makes which stays as it is: the first, or one after many where momentum has
    made that larger; of each element, in float64, without weight decay."""
    bare = _bare(group)
    start, wide = stored.detach().double(), gradient.detach().double()
    first, before, after = (stepped(optimizer, bare, start, wide, steps) for steps in (1, _MANY - 1, _MANY))
    return torch.maximum((first - start).abs(), (after - before).abs())


def lost(stored: Tensor, steps: Tensor) -> float:
    """Share of the elements that neither adding nor subtracting their step changes in their dtype, of those that
    take one.

    Args:
        stored: the parameter.
        steps: sizes of the same shape, float64; one is not 0.
    """
    wide = stored.detach().double()
    still = ((wide + steps).to(stored.dtype) == stored) & ((wide - steps).to(stored.dtype) == stored)
    return float(still[steps > 0].double().mean())


def full_rate(group: Mapping[str, Any]) -> dict[str, Any]:
    """The group at the learning rate that its schedule started from, where there is one."""
    first = group.get("initial_lr")
    return {**group} if first is None else {**group, "lr": first}


def _bare(group: Mapping[str, Any]) -> Mapping[str, Any]:
    """The group without weight decay."""
    return {**group, "weight_decay": 0.0} if group.get("weight_decay") else group


def _number(value: Any) -> float | None:
    return None if value is None or isinstance(value, bool) else float(value)
