"""Which value a tensor holds now: tensors by weak reference, in-place writes by storage and region."""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from itertools import takewhile
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, UntypedStorage, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import is_traceable_wrapper_subclass


@dataclass(slots=True)
class _Write:
    value: int
    start: int
    stop: int


class ValueTable:
    """Maps live tensors to value numbers. Python ids are reused, so every entry is checked by its weak reference.

    Writes are kept per storage with the interval of elements they touch; the storage's weak reference keeps its
    address from being reused while the entry lives.
    """

    def __init__(self) -> None:
        self._values: dict[int, tuple[weakref.ref[Tensor], int]] = {}
        self._writes: dict[int, tuple[StorageWeakRef, list[_Write]]] = {}

    def get(self, tensor: Tensor) -> int | None:
        """The value last bound to this very tensor object, or None."""
        entry = self._values.get(id(tensor))
        if entry is None or entry[0]() is not tensor:
            return None
        return entry[1]

    def bind(self, tensor: Tensor, value: int) -> None:
        """Say that `tensor` now holds `value`."""
        self._values[id(tensor)] = (weakref.ref(tensor), value)

    def wrote(self, tensor: Tensor, value: int) -> None:
        """Say that `value` was written in place through `tensor`."""
        self.bind(tensor, value)
        storage = _storage(tensor)
        if storage is None:
            return
        _, writes = self._writes.setdefault(storage.cdata, (storage, []))
        writes.append(_Write(value, *_interval(tensor)))

    def later_writes(self, tensor: Tensor, value: int) -> list[int]:
        """Values written after `value` into memory that `tensor` sees, latest last."""
        if not self._writes:
            return []
        storage = storage_of(tensor)
        entry = self._writes.get(storage._cdata) if storage is not None else None
        if entry is None or entry[1][-1].value <= value:
            return []
        start, stop = _interval(tensor)
        later = list(takewhile(lambda w: w.value > value, reversed(entry[1])))
        return [w.value for w in later[::-1] if w.start < stop and start < w.stop]


def storage_of(tensor: Tensor) -> UntypedStorage | None:
    """The memory of a tensor; None for subclasses and sparse layouts, which have none of their own."""
    try:
        return tensor.untyped_storage()
    except (NotImplementedError, RuntimeError):
        return None


def held_tensor(model: nn.Module, name: str) -> Tensor:
    """The parameter or buffer of a model by its name; script modules hold theirs without `get_parameter`."""
    tensor: Tensor = attrgetter(name)(model)
    return tensor


_PACKED = getattr(torch, "float4_e2m1fn_x2", None)  # two numbers a byte, which hold neither NaN nor infinities


def widened(x: Tensor) -> Tensor:
    """`x` in a dtype that torch computes in: floats of 8 bits, which it only stores, in float32; of packed numbers of 4
    bits the numbers of their bytes."""
    if x.dtype == _PACKED:
        return x.view(torch.uint8).float()
    return x.float() if x.is_floating_point() and x.dtype.itemsize == 1 else x


def inner_tensors(tensor: Any) -> list[Tensor]:
    """The tensors that one of a subclass is made of (the integers and scales of a quantised weight), at any depth."""
    if not is_traceable_wrapper_subclass(tensor):
        return []
    names, _ = tensor.__tensor_flatten__()
    parts = [getattr(tensor, name) for name in names]
    return [part for held in parts for part in (held, *inner_tensors(held))]


def _storage(tensor: Tensor) -> StorageWeakRef | None:
    storage = storage_of(tensor)
    return None if storage is None else StorageWeakRef(storage)  # type: ignore[no-untyped-call]


def _interval(tensor: Tensor) -> tuple[int, int]:
    """Half-open interval of element positions in the storage that `tensor` can touch."""
    if tensor.numel() == 0:
        return 0, 0
    start = int(tensor.storage_offset())
    return start, start + sum((n - 1) * int(s) for n, s in zip(tensor.shape, tensor.stride(), strict=True)) + 1


Sources = dict[int, tuple[Tensor, str, str]]  # by id: the tensor, "buffer" or "parameter", its name


def sources(model: nn.Module) -> Sources:
    """The tensors that a model holds, with those inside of them."""
    found: Sources = {}
    for kind, named in (("buffer", model.named_buffers()), ("parameter", model.named_parameters())):
        for name, tensor in named:
            found.update({id(held): (held, kind, name) for held in (tensor, *inner_tensors(tensor))})
    return found


def put_in_place(known: Sources, path: str, module: nn.Module) -> list[tuple[str, Tensor]]:
    """Parameters of a module that were put in place after the model's own were named (gathered from their shards): they
    are named now."""
    fresh: list[tuple[str, Tensor]] = []
    for name, tensor in module._parameters.items():
        if tensor is not None and known.get(id(tensor), (None,))[0] is not tensor:
            known[id(tensor)] = tensor, "parameter", name if path == "." else f"{path}.{name}"
            fresh.append((known[id(tensor)][2], tensor))
    return fresh
