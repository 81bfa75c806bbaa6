"""Wrap the forwards of modules for a while. Direct `.forward()` calls are seen too, which hooks would miss."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn
from torch.jit import ScriptModule

Around = Callable[[str, nn.Module, Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any]


@contextmanager
def wrapped_forwards(model: nn.Module, around: Around) -> Iterator[None]:
    """While open, every run of a module's forward goes through `around(path, module, forward, args, kwargs)`.

    The root's path is ".". Shared modules are wrapped once, under their first path. Script modules are left alone.
    Whatever an instance had as `forward` in its own dictionary (accelerate puts one there) is put back at the end.
    """
    saved: list[tuple[nn.Module, bool, Any]] = []
    try:
        for path, module in model.named_modules():
            if isinstance(module, ScriptModule):
                continue
            own = "forward" in module.__dict__
            saved.append((module, own, module.__dict__.get("forward")))
            module.__dict__["forward"] = _wrapper(path or ".", module, module.forward, around)
        yield
    finally:
        for module, own, forward in reversed(saved):
            if own:
                module.__dict__["forward"] = forward
            else:
                module.__dict__.pop("forward", None)


def _wrapper(path: str, module: nn.Module, forward: Callable[..., Any], around: Around) -> Callable[..., Any]:
    @functools.wraps(forward)
    def call(*args: Any, **kwargs: Any) -> Any:
        return around(path, module, forward, args, kwargs)

    return call
