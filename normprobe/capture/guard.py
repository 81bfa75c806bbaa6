"""Leave no trace: what a forward can change in a model or in torch is saved before and put back after."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn


@contextmanager
def untouched(model: nn.Module) -> Iterator[None]:
    """While open the model is in eval mode and torch's fused encoder path is off; afterwards all is as it was.

    Restored bit for bit, also when the body raises: buffers, train flags, attributes of every module (caches,
    counters, plain tensors), hooks, which parameters require gradients and their `.grad`, random states of Python,
    numpy (when loaded) and torch on every device. The values of parameters are not copied: a forward in eval mode
    that writes into its own parameters is not undone.
    """
    states = [_ModuleState(module) for module in model.modules()]
    rng, grad = _rng_states(model), torch.is_grad_enabled()
    fast_path = torch.backends.mha.get_fastpath_enabled()
    try:
        model.eval()
        torch.backends.mha.set_fastpath_enabled(False)
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(fast_path)
        torch.set_grad_enabled(grad)
        for state in states:
            state.restore()
        _restore_rng(rng)


class _ModuleState:
    """One module's own state: its dictionary, its inner dictionaries, and the contents of its plain tensors."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.own = dict(module.__dict__)
        self.inner = [(c, c.copy()) for value in self.own.values() for c in _containers(value)]
        tensors = [*self.own.values(), *module._buffers.values()]
        self.tensors = [(t, t.detach().clone()) for t in tensors if isinstance(t, Tensor)]
        self.flags = [(p, p.requires_grad, p.grad) for p in module._parameters.values() if p is not None]

    def restore(self) -> None:
        """Put back what changed; identity of every container and tensor is kept."""
        own = self.module.__dict__
        if own.keys() != self.own.keys() or any(own[k] is not v for k, v in self.own.items()):
            own.clear()
            own.update(self.own)
        for container, contents in self.inner:
            _refill(container, contents)
        with torch.no_grad():
            for tensor, copy in self.tensors:
                if tensor.shape != copy.shape or tensor.dtype != copy.dtype:
                    tensor.data = copy
                elif tensor.device.type != "meta" and not _same_bits(tensor, copy):
                    tensor.copy_(copy)
        for parameter, requires_grad, grad in self.flags:
            parameter.requires_grad_(requires_grad)
            parameter.grad = grad


def _containers(value: Any, depth: int = 4) -> Iterator[Any]:
    """`value` if it is a dictionary, list or set, and those inside it, to a depth that ends every cycle."""
    if not isinstance(value, (dict, list, set)) or not depth:
        return
    yield value
    for inner in value.values() if isinstance(value, dict) else value:
        yield from _containers(inner, depth - 1)


def _refill(container: Any, copy: Any) -> None:
    """Give a dictionary, list or set its old contents back, keeping its identity."""
    if isinstance(container, list):
        container[:] = copy
    else:
        container.clear()
        container.update(copy)


def _same_bits(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors of one shape and dtype hold the same bits: NaN equals NaN, 0 is not −0."""
    if a.layout is not torch.strided:
        return False
    return torch.equal(a.detach().contiguous().view(-1).view(torch.uint8), b.contiguous().view(-1).view(torch.uint8))


def _rng_states(model: nn.Module) -> dict[str, Any]:
    states: dict[str, Any] = {"python": random.getstate(), "cpu": torch.get_rng_state()}
    if "numpy" in sys.modules:
        states["numpy"] = sys.modules["numpy"].random.get_state()
    devices = {p.device for p in model.parameters()} | {b.device for b in model.buffers()}
    for device in devices - {torch.device("cpu"), torch.device("meta")}:
        states[str(device)] = torch.get_device_module(device).get_rng_state(device)
    return states


def _restore_rng(states: dict[str, Any]) -> None:
    random.setstate(states.pop("python"))
    torch.set_rng_state(states.pop("cpu"))
    if "numpy" in states:
        sys.modules["numpy"].random.set_state(states.pop("numpy"))
    for name, state in states.items():
        torch.get_device_module(torch.device(name)).set_rng_state(state, torch.device(name))
