"""What a forward returned: the tensors in it with the names of their places."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor
from torch.utils import _pytree as pytree


def named_tensors(output: Any) -> list[tuple[str, Tensor]]:
    """All tensors in `output`, in order, each with its dotted place, as in `hidden_states.0`.

    Opens mappings (transformers' outputs are some), named tuples, lists, tuples, sets, dataclasses and what is
    registered with torch's pytree, in each other to any depth. A bare tensor is "output". A tensor that stands in
    two places is listed twice.
    """
    if type(output) is Tensor:
        return [("output", output)]
    return [(place or "output", tensor) for place, tensor in _walk(output, "", ())]


def _walk(value: Any, place: str, around: tuple[int, ...]) -> Iterator[tuple[str, Tensor]]:
    if isinstance(value, Tensor):
        yield place, value
    elif id(value) not in around:  # a dataclass may hold itself
        for name, part in _parts(value):
            yield from _walk(part, f"{place}.{name}" if place else name, (*around, id(value)))


def _parts(value: Any) -> list[tuple[str, Any]]:
    """What `value` holds, by name; nothing if it is no container."""
    if isinstance(value, Mapping):
        return [(str(name), part) for name, part in value.items()]
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return list(zip(value._fields, value, strict=True))
    if isinstance(value, (list, tuple, set, frozenset)):
        return [(str(index), part) for index, part in enumerate(value)]
    if dataclasses.is_dataclass(value):
        return [(f.name, getattr(value, f.name, None)) for f in dataclasses.fields(value)]
    leaves = pytree.tree_leaves(value)
    return [] if leaves == [] or leaves[0] is value else [(str(index), part) for index, part in enumerate(leaves)]
