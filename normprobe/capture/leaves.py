"""Tensors in the arguments and results of calls: found and replaced, fast for the plain containers that most have."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

_PLAIN = frozenset({
    type(None), bool, int, float, complex, str,
    torch.dtype, torch.device, torch.layout, torch.memory_format, torch.Size,
})  # fmt: skip


def replaced(tree: Any, new: Callable[[Any], Any], of: type = Tensor) -> Any:
    """`tree` with `new(leaf)` in the place of every leaf of one type, in order; opens what torch's pytree opens."""
    kind = type(tree)
    if kind is of:
        return new(tree)
    if kind in _PLAIN:
        return tree
    if kind is tuple:
        return tuple([replaced(part, new, of) for part in tree])
    if kind is list:
        return [replaced(part, new, of) for part in tree]
    if kind is dict:
        return {name: replaced(part, new, of) for name, part in tree.items()}
    return new(tree) if isinstance(tree, of) else pytree.tree_map_only(of, new, tree)


def tensors(tree: Any) -> list[Tensor]:
    """The tensors in `tree`, in order."""
    if type(tree) is Tensor:
        return [tree]
    found: list[Tensor] = []
    _collect(tree, found)
    return found


def _collect(tree: Any, found: list[Tensor]) -> None:
    kind = type(tree)
    if kind in _PLAIN:
        return
    if kind is tuple or kind is list:
        for part in tree:
            _collect(part, found)
    elif kind is dict:
        for part in tree.values():
            _collect(part, found)
    elif isinstance(tree, Tensor):
        found.append(tree)
    else:
        found += [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, Tensor)]


def dotted(path: Any) -> str:
    """The place of a leaf in nested containers, as in `hidden_states.0`."""
    return ".".join(str(getattr(key, "key", getattr(key, "idx", getattr(key, "name", key)))) for key in path)
