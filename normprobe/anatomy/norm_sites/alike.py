"""Whether two modules run the same code with the same settings, so that what one of them is the other one is too."""

from __future__ import annotations

import numbers
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

from normprobe.norms.rebuild import HOOKS

_PLAIN = (str, bytes, numbers.Number, torch.dtype, torch.device, torch.Size, type(None), type)
_TENSORS = frozenset({"_parameters", "_buffers"})  # their values are drawn anew when a copy is identified
_DEPTH = 4  # containers in containers that are looked into


def settings(module: nn.Module) -> Any:
    """What decides, beside the values of parameters and buffers, what a module computes; equal only if that is.

    Classes, numbers, texts and functions that the module and those inside it hold; another object counts as equal
    only to itself. The recorded operations do not say it all: a cast that changes nothing in float32 leaves none.
    """
    parts = {id(part): name for name, part in module.named_modules()}
    return tuple((name, type(part), _own(part, parts)) for name, part in module.named_modules())


def _own(part: nn.Module, parts: dict[int, str]) -> Any:
    held = {k: v for k, v in part.__dict__.items() if k not in HOOKS and k != "_modules"}
    return tuple((k, _shapes(v) if k in _TENSORS else _fact(v, parts, _DEPTH)) for k, v in sorted(held.items()))


def _shapes(tensors: dict[str, Tensor | None]) -> Any:
    return tuple((name, None if t is None else (t.shape, t.dtype)) for name, t in tensors.items())


def _fact(item: Any, parts: dict[int, str], depth: int) -> Any:
    """An item as something that can be compared; `parts` are the modules whose own facts are told elsewhere."""
    if isinstance(item, _PLAIN):
        return type(item), item
    if id(item) in parts:
        return "part", parts[id(item)]
    if isinstance(item, MethodType):
        return "method", _fact(item.__func__, parts, depth), _fact(item.__self__, parts, depth)
    if depth and type(item) in (list, tuple):
        return type(item), tuple(_fact(each, parts, depth - 1) for each in item)
    if depth and type(item) in (set, frozenset):
        return type(item), frozenset(_fact(each, parts, depth - 1) for each in item)
    if depth and type(item) is dict:
        return dict, tuple((_fact(k, parts, depth - 1), _fact(v, parts, depth - 1)) for k, v in item.items())
    return "object", id(item)
