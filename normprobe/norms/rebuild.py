"""A copy of a module in another dtype and with other values, that shares nothing with the original."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

HOOKS = (
    "_forward_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
    "_forward_pre_hooks",
    "_forward_pre_hooks_with_kwargs",
    "_backward_hooks",
    "_backward_pre_hooks",
    "_state_dict_hooks",
    "_state_dict_pre_hooks",
    "_load_state_dict_pre_hooks",
    "_load_state_dict_post_hooks",
)


def floating_tensors(module: nn.Module) -> tuple[dict[str, Tensor], frozenset[str]]:
    """The floating parameters and buffers by name, each tensor once, and which names are parameters."""
    parameters = {n: p for n, p in module.named_parameters() if p.is_floating_point()}
    buffers = {n: b for n, b in module.named_buffers() if b.is_floating_point()}
    return {**parameters, **buffers}, frozenset(parameters)


def rebuild(
    module: nn.Module,
    dtype: torch.dtype,
    device: torch.device,
    values: Mapping[str, Tensor],
    hooked: bool = False,
) -> nn.Module:
    """A deep copy of `module` on `device`, its floating tensors cast to `dtype`.

    Every tensor is put into the copy's memo beforehand. So the copy is made once, in the right dtype, also
    from the meta device and from tensors that are no leaves of a graph (old weight norm), which a deep copy
    refuses. Values that the meta device does not hold are NaN.

    Args:
        module: left untouched.
        dtype: dtype of all floating tensors of the copy.
        device: device of all its tensors.
        values: values for floating parameters and buffers by name; the others keep theirs.
        hooked: whether the copy calls the very hooks of `module`, which belong to what it computes; else it has none.
    """
    memo: dict[int, Any] = {}
    for name, tensor in [*module.named_parameters(), *module.named_buffers()]:
        value = values.get(name, tensor)
        target = dtype if tensor.is_floating_point() else tensor.dtype
        memo[id(tensor)] = _like(tensor, _moved(value, target, device))
    for part in module.modules():
        for key, item in part.__dict__.items():
            if key in HOOKS and item:
                memo[id(item)] = item.copy() if hooked else type(item)()
            elif isinstance(item, Tensor) and id(item) not in memo:
                target = dtype if item.is_floating_point() else item.dtype
                memo[id(item)] = _moved(item, target, device)
    return copy.deepcopy(module, memo)


def _like(original: Tensor, value: Tensor) -> Tensor:
    return nn.Parameter(value, requires_grad=False) if isinstance(original, nn.Parameter) else value


def _moved(value: Tensor, dtype: torch.dtype, device: torch.device) -> Tensor:
    if value.device.type == "meta":
        unknown = float("nan") if dtype.is_floating_point else 0
        return torch.full(value.shape, unknown, dtype=dtype, device=device)
    return value.detach().to(device=device, dtype=dtype, copy=True)
