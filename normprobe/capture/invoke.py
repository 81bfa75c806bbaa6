"""Call a model with the inputs a person gave: a tensor, a tuple, or a dict; without a cache where it accepts that."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from normprobe.errors import InputError

Inputs = Tensor | tuple[Any, ...] | list[Any] | Mapping[str, Any]


def invoke(model: nn.Module, inputs: Inputs) -> Any:
    """The output of `model` on `inputs`.

    A mapping is passed by keyword, a tuple or list by position, anything else as the only argument.
    `use_cache=False` is added where the forward has that parameter and the caller did not set it.
    """
    args, kwargs = split(inputs)
    if "use_cache" not in kwargs and _accepts_cache_flag(model):
        kwargs["use_cache"] = False
    return model(*args, **kwargs)


def split(inputs: Inputs) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Positional and keyword arguments for `inputs`.

    Raises:
        InputError: if `inputs` is None or holds no argument.
    """
    if inputs is None:
        raise InputError("no inputs were given", hint="pass inputs= a tensor, a tuple or a dict")
    if isinstance(inputs, Mapping):
        return (), dict(inputs)
    if isinstance(inputs, (tuple, list)):
        return tuple(inputs), {}
    return (inputs,), {}


def _accepts_cache_flag(model: nn.Module) -> bool:
    try:
        return "use_cache" in inspect.signature(model.forward).parameters
    except (TypeError, ValueError):  # a forward written in C has no signature to read
        return False
