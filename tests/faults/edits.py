"""Tools of the operators: modules, parameters and operations that an Anatomy names, changed for good.

What is laid over a module changes its class to a subclass of its own, so that the object keeps its parameters, its
children and the attributes that other code reads.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from normprobe.capture.composites import opened
from normprobe.records import Anatomy, NormSite, OpSite
from tests.faults.fault import NotHereError

Forward = Callable[..., Any]


def module_at(model: nn.Module, path: str) -> nn.Module:
    """The module at `path`, "." for the root."""
    return model.get_submodule("" if path == "." else path)


def norm_at(anatomy: Anatomy, path: str | None) -> NormSite:
    """The norm at `path`, which the Anatomy has."""
    found = anatomy.norm(path or "")
    if found is None:
        raise NotHereError(f"no norm at {path}")
    return found


def replace(model: nn.Module, path: str, module: nn.Module) -> None:
    """Put `module` in the place of the one at `path`, in train or eval mode as that was."""
    if path == ".":
        raise NotHereError("the model itself cannot be replaced")
    parent, _, name = path.rpartition(".")
    setattr(model.get_submodule(parent), name, module.train(model.get_submodule(path).training))


def overlay(module: nn.Module, forward: Callable[..., Any]) -> None:
    """Have `module` compute `forward(below, *args, **kwargs)`, where `below` is its forward as it was."""
    if "forward" in module.__dict__:
        raise NotHereError("its forward was replaced on the instance")
    base = type(module)

    def laid(self: Any, *args: Any, **kwargs: Any) -> Any:
        return forward(super(kind, self).forward, *args, **kwargs)

    body = {"__module__": base.__module__, "__qualname__": base.__qualname__, "forward": laid}
    kind: Any = type(base)(base.__name__, (base,), body)
    module.__class__ = kind


def uncalled(model: nn.Module, path: str) -> None:
    """The module at `path` stays built, and its parent's forward goes on with what it would have been given."""
    if path == ".":
        raise NotHereError("the model itself has no parent")
    parent, _, name = path.rpartition(".")
    holder = module_at(model, parent or ".")

    def around(below: Forward, *args: Any, **kwargs: Any) -> Any:
        held = holder._modules[name]
        holder._modules[name] = Passing(held)
        try:
            return below(*args, **kwargs)
        finally:
            holder._modules[name] = held

    overlay(holder, around)


class Passing(nn.Module):
    """Gives back the first thing it is given; what other code reads of the module that it stands for is still there."""

    def __init__(self, instead: nn.Module | None = None) -> None:
        super().__init__()
        self.__dict__["instead"] = (instead,)  # none of its parameters are the model's any more

    def __getattr__(self, name: str) -> Any:
        held = self.__dict__.get("instead", (None,))[0]
        return super().__getattr__(name) if held is None else getattr(held, name)

    def forward(self, x: Any, *args: Any, **kwargs: Any) -> Any:
        return x


class Twice(nn.Module):
    """A module and another one behind it; what other code reads of the first is still there."""

    def __init__(self, first: nn.Module, second: nn.Module) -> None:
        super().__init__()
        self.first, self.second = first, second

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self._modules["first"], name)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.second(self.first(*args, **kwargs))


def passing(model: nn.Module, path: str) -> None:
    """Put the identity in the place of a module."""
    replace(model, path, Passing(module_at(model, path)))


# ---- tensors


def parameter(model: nn.Module, path: str | None) -> Tensor:
    """The parameter (or buffer that stands for one) at `path`."""
    held = dict(model.named_parameters(remove_duplicate=False)) | dict(model.named_buffers(remove_duplicate=False))
    if path is None or path not in held:
        raise NotHereError(f"no parameter at {path}")
    return held[path]


@contextmanager
def writing() -> Iterator[torch.Generator]:
    """No gradients, and a seeded generator."""
    with torch.no_grad():
        yield torch.Generator().manual_seed(11)


def scale(model: nn.Module, paths: tuple[str, ...] | list[str], factor: float) -> None:
    """Multiply parameters by `factor`, a parameter that occurs under several names once."""
    found = {id(p): p for p in (parameter(model, path) for path in paths)}
    with writing():
        for held in found.values():
            held.mul_(factor)


# ---- values


def first_tensor(values: Any) -> Tensor | None:
    """The first floating tensor in a structure."""
    return next((v for v in pytree.tree_leaves(values) if isinstance(v, Tensor) and v.is_floating_point()), None)


def with_first(values: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """A structure with its first floating tensor changed; other occurrences of that tensor with it."""
    first = first_tensor(values)
    if first is None:
        raise NotHereError("no floating tensor passes there")
    made = change(first)
    leaves, spec = pytree.tree_flatten(values)
    return pytree.tree_unflatten([made if leaf is first else leaf for leaf in leaves], spec)


def before(module: nn.Module, change: Callable[[Tensor], Tensor]) -> None:
    """Change the first floating tensor that the module is given."""

    def given(below: Forward, *args: Any, **kwargs: Any) -> Any:
        args, kwargs = with_first((args, kwargs), change)
        return below(*args, **kwargs)

    overlay(module, given)


def behind(module: nn.Module, change: Callable[[Tensor], Tensor]) -> None:
    """Change the first floating tensor that the module returns."""
    overlay(module, lambda below, *args, **kwargs: with_first(below(*args, **kwargs), change))


# ---- operations


class _Counter:
    """Finds the operation of one `OpSite` among those that run directly inside its module."""

    def __init__(self, site: OpSite, change: Callable[..., Any]) -> None:
        super().__init__()
        self.site, self.change = site, change
        self.inside = self.seen = 0

    def handle(self, name: str, func: Any, args: Any, kwargs: Any) -> Any:
        if self.inside == 0 and name == self.site.op:
            self.seen += 1
            if self.seen == self.site.ordinal + 1:
                return self.changed(func, args, kwargs or {})
        return func(*args, **(kwargs or {}))

    def changed(self, func: Any, args: Any, kwargs: Any) -> Any:
        """What is put in the place of the operation, which alone counts for changes of others in the same module."""

        def run(*args: Any, **kwargs: Any) -> Any:
            with _all_inside(-1):
                return func(*args, **kwargs)

        with _all_inside(1):
            return self.change(run, *args, **kwargs)


_active: list[_Counter] = []


@contextmanager
def _all_inside(more: int) -> Iterator[None]:
    modes = list(_active)
    for mode in modes:
        mode.inside += more
    try:
        yield
    finally:
        for mode in modes:
            mode.inside -= more


class _Operators(_Counter, TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self.handle(str(func), func, args, kwargs)


class _Functions(_Counter, TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        inner = opened(func)
        if inner is not None:
            with self:
                return inner(*args, **(kwargs or {}))
        return self.handle(getattr(func, "__name__", ""), func, args, kwargs)


def at(model: nn.Module, site: OpSite, change: Callable[..., Any]) -> None:
    """Have the operation at `site` be `change(run, *args, **kwargs)` in every forward, in each run of its module.

    What `change` does to an operator of ATen, besides `run`, lies below autograd: it gets no gradient, and torch
    functions that no operator stands for (`type_as`) are seen as they are. For levels without a backward.
    """
    module = module_at(model, site.path)
    current: list[_Operators | _Functions] = []

    def enter(*_: Any) -> None:
        for mode in current:
            mode.inside += 1

    def leave(*_: Any) -> None:
        for mode in current:
            mode.inside -= 1

    for child in module.modules():
        if child is not module:
            child.register_forward_pre_hook(enter)
            child.register_forward_hook(leave, always_call=True)

    def around(below: Forward, *args: Any, **kwargs: Any) -> Any:
        with (_Operators if "." in site.op else _Functions)(site, change) as mode:
            current.append(mode)
            _active.append(mode)
            try:
                return below(*args, **kwargs)
            finally:
                current.pop()
                _active.pop()

    overlay(module, around)
