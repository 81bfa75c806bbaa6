"""Writes in place: which tensors an operation changes, and a copy of each just before its first change."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import _disable_current_modes

from normprobe.capture.modes import DispatchMode
from normprobe.capture.storage import storage_of


@cache
def written_arguments(function: Any) -> tuple[tuple[int, str], ...]:
    """Position and name of the arguments that an operator writes in place, by its schema."""
    schema = getattr(function, "_schema", None)  # operators of higher order have none
    if schema is None or not schema.is_mutable:
        return ()
    infos = [(place, a.name, a.alias_info) for place, a in enumerate(schema.arguments)]
    return tuple((place, name) for place, name, info in infos if info is not None and info.is_write)


def written(function: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Tensor]:
    """The tensors that a call of an operator writes in place."""
    found: list[Tensor] = []
    for place, name in written_arguments(function):
        value = args[place] if place < len(args) else kwargs.get(name)
        found += [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, Tensor)]
    return found


class Keeper:
    """Holds tensors without a copy, until something is about to write into their memory.

    Args:
        outer: a keeper that lives longer; what it holds is left to it, so that a backward pass between the two
            ends still sees the memory as the forward left it.

    Attributes:
        steps: each puts the contents of one copied tensor back.
        wrote: whether a tensor that is held here or further out was written.
    """

    def __init__(self, outer: Keeper | None = None) -> None:
        self.steps: list[partial[None]] = []
        self.wrote = False
        self._outer = outer
        self._held: dict[int, list[Tensor]] = {}  # by storage; emptied once they are copied

    def hold(self, tensor: Tensor) -> None:
        """Look after `tensor`; its storage stays alive as long as the keeper does."""
        storage = _storage(tensor)
        if storage is not None and not (self._outer is not None and self._outer.knows(storage)):
            self._held.setdefault(storage, []).append(tensor)

    def knows(self, storage: int) -> bool:
        """Whether a tensor of this storage is held here or further out."""
        return storage in self._held or (self._outer is not None and self._outer.knows(storage))

    def before_write(self, tensors: Sequence[Tensor]) -> None:
        """These tensors are about to be written: copy what is held of their storages and not copied yet."""
        if self._outer is not None:
            self._outer.before_write(tensors)
            self.wrote |= self._outer.wrote
        for tensor in tensors:
            storage = _storage(tensor)
            held = self._held.get(storage) if storage is not None else None
            if held:
                with _disable_current_modes(), torch.no_grad():
                    self.steps += [partial(put_contents_back, each, each.clone()) for each in held]
                held.clear()
                self.wrote = True

    def mode(self) -> DispatchMode:
        """A mode under which every write is reported."""
        return _Writes(self)


class _Writes(DispatchMode):
    supports_higher_order_operators = True

    def __init__(self, keeper: Keeper) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.keeper = keeper

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if written_arguments(func):
            self.keeper.before_write(written(func, args, kwargs))
        return func(*args, **kwargs)


@contextmanager
def writable(*tensors: Tensor) -> Iterator[None]:
    """While open these may be written, without gradients: outside inference mode, but for what was made there, which
    torch lets nobody write elsewhere."""
    with torch.inference_mode(any(tensor.is_inference() for tensor in tensors)), torch.no_grad():
        yield


def put_contents_back(tensor: Tensor, copy: Tensor) -> None:
    """Write the bits of `copy` into `tensor` where they differ."""
    if _same_bits(tensor, copy):
        return
    with torch.no_grad():
        tensor.copy_(copy)


def _same_bits(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors of one shape and dtype hold the same bits: NaN equals NaN, 0 is not −0."""
    if a.layout is not torch.strided:
        return False
    return torch.equal(a.detach().contiguous().view(-1).view(torch.uint8), b.contiguous().view(-1).view(torch.uint8))


def _storage(tensor: Tensor) -> int | None:
    storage = storage_of(tensor)
    return None if storage is None else int(storage._cdata)
