"""Everything that a probe must leave as it was, taken before and compared after."""

from __future__ import annotations

import copy
import random
from collections import deque
from collections.abc import Mapping
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import normprobe.probing  # noqa: F401  its first import draws a random number (in rich), a test of its own

HOOKS = (
    "_forward_hooks",
    "_forward_pre_hooks",
    "_backward_hooks",
    "_backward_pre_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_pre_hooks_with_kwargs",
    "_forward_hooks_always_called",
    "_state_dict_hooks",
    "_load_state_dict_pre_hooks",
)


class Snapshot:
    """The state of a model, of the inputs it is given and of torch at one moment."""

    def __init__(self, model: nn.Module, inputs: Any = None) -> None:
        self.model, self.inputs = model, inputs
        self.state = state_of(model, inputs)

    def changes(self) -> list[str]:
        """Names of what is not as it was."""
        now = state_of(self.model, self.inputs)
        names = [*self.state, *(k for k in now if k not in self.state)]
        return [n for n in names if n not in now or n not in self.state or not same(self.state[n], now[n])]

    def assert_kept(self) -> None:
        assert self.changes() == []


def state_of(model: nn.Module, inputs: Any = None) -> dict[str, Any]:
    state: dict[str, Any] = {
        "inputs": frozen(inputs),
        "rng torch": torch.get_rng_state(),
        "rng python": random.getstate(),
        "rng numpy": np.random.get_state(),
        "fast path": torch.backends.mha.get_fastpath_enabled(),
        "grad enabled": torch.is_grad_enabled(),
        "inference mode": torch.is_inference_mode_enabled(),
        "autocast": torch.is_autocast_enabled("cpu"),
        "default dtype": torch.get_default_dtype(),
        "function modes": len(torch.overrides._get_current_function_mode_stack()),
        "dispatch modes": torch._C._len_torch_dispatch_stack(),
    }
    for path, module in model.named_modules():
        state |= {f"{path}: {k}": v for k, v in module_state(module).items()}
    for name, parameter in model.named_parameters():
        state[f"parameter {name}"] = (id(parameter), bits(parameter), parameter.requires_grad)
        state[f"gradient {name}"] = (id(parameter.grad), bits(parameter.grad))
        hooks = parameter._backward_hooks
        state[f"hooks of {name}"] = None if hooks is None else list(hooks)
    config = getattr(model, "config", None)
    if hasattr(config, "to_dict"):
        state["config"] = copy.deepcopy(config.to_dict())
    return state


def module_state(module: nn.Module) -> dict[str, Any]:
    own = module.__dict__
    state: dict[str, Any] = {"keys": list(own), "training": module.training, "class": type(module)}
    state["forward"] = id(own["forward"]) if "forward" in own else None
    state |= {k: [(key, id(hook)) for key, hook in own[k].items()] for k in HOOKS if k in own}
    for name, value in own.items():
        if name not in HOOKS and name not in ("_parameters", "_modules"):
            state[f"attribute {name}"] = (id(value), frozen(value))
    return state


def frozen(value: Any, depth: int = 6) -> Any:
    """A copy of plain data, tensors and what plain objects hold; of anything else nothing."""
    if isinstance(value, Tensor):
        return bits(value), value.requires_grad, value.grad_fn, bits(value.grad) if value.is_leaf else None
    if isinstance(value, (int, float, str)) or not depth:
        return value if isinstance(value, (int, float, str)) else None
    if isinstance(value, Mapping):
        return {k: frozen(v, depth - 1) for k, v in value.items()}
    if isinstance(value, (list, tuple, deque)):
        return [frozen(v, depth - 1) for v in value]
    if isinstance(value, (set, frozenset)):
        return sorted(value, key=repr)
    plain = hasattr(value, "__dict__") and not callable(value) and not isinstance(value, ModuleType)
    return {k: frozen(v, depth - 1) for k, v in vars(value).items()} if plain else None


def bits(tensor: Tensor | None) -> Any:
    """Shape, dtype, identity of the memory and the bytes of a tensor."""
    if tensor is None or tensor.device.type == "meta":
        return None
    flat = tensor.detach().contiguous().flatten()
    return str(tensor.dtype), tuple(tensor.shape), tensor.data_ptr(), flat.view(torch.uint8).clone().numpy().tobytes()


def same(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor):
        return torch.equal(a, b)
    if isinstance(a, tuple) and any(isinstance(x, np.ndarray) for x in a):
        return all(np.array_equal(x, y) for x, y in zip(a, b, strict=True))
    return bool(a == b)
