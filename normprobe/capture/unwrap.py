"""Look behind wrappers that only run another module: data parallelism, `torch.compile`, PEFT."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import cast

from torch import nn
from torch.nn.parallel import DataParallel, DistributedDataParallel


def unwrapped(model: nn.Module) -> nn.Module:
    """The module inside the wrappers around `model`, so that paths are those of the user's own module.

    The inner module is run directly: on its own device, and uncompiled. Adapters that PEFT injected stay in it.
    """
    while True:
        inner = _inner(model)
        if inner is None:
            return model
        model = inner


@contextmanager
def wrappers_aside(model: nn.Module) -> Iterator[None]:
    """While open, the wrappers around modules inside `model` (compiled blocks, say) are replaced by what they wrap."""
    aside: list[tuple[nn.Module, str, nn.Module]] = []
    try:
        for module in list(model.modules()):
            for name, child in module._modules.items():
                if child is not None and _inner(child) is not None:
                    aside.append((module, name, child))
                    module._modules[name] = unwrapped(child)
        yield
    finally:
        for module, name, child in aside:
            module._modules[name] = child


def _inner(model: nn.Module) -> nn.Module | None:
    if isinstance(model, (DataParallel, DistributedDataParallel)):
        return cast(nn.Module, model.module)
    compiled = sys.modules.get("torch._dynamo.eval_frame")
    if compiled is not None and isinstance(model, compiled.OptimizedModule):
        return cast(nn.Module, model._orig_mod)
    peft = sys.modules.get("peft")
    if peft is not None and isinstance(model, peft.PeftModel):
        return cast(nn.Module, model.get_base_model())  # learned prompts wrap the model itself, adapters its tuner
    return None
