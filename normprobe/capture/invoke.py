"""Call a model with copies of the inputs a person gave: a tensor, a tuple, or a dict; without a cache if it can."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import _disable_current_modes

from normprobe.errors import InputError

Inputs = Tensor | tuple[Any, ...] | list[Any] | Mapping[str, Any]

_PLAIN = frozenset({Tensor, bool, int, float, str, type(None)})  # hold no module of the model
_SPARE = 2  # a tensor's storage is copied as a whole where it is at most this many times as large as the tensor


def invoke(
    model: nn.Module,
    inputs: Inputs,
    place: Callable[[Tensor], Tensor] | None = None,
    run: Callable[..., Any] | None = None,
) -> Any:
    """The output of `model` on its own copy of `inputs`.

    A mapping is passed by keyword, a tuple or list by position, anything else as the only argument.
    `use_cache=False` is added where the forward has that parameter and the caller did not set it.

    A forward may write into its input or let a cache grow in it, so every call gets a copy of the inputs, which
    takes their memory once more. Tensors have no history in autograd, leaves keep `requires_grad`; views of one
    storage share a copy of it where they make up most of it. All else is copied deeply, but for modules,
    parameters and buffers of `model` itself. `place` moves the tensors among the copies to where the model is,
    `run` is called in the model's place.

    Raises:
        InputError: if `inputs` is None, or an argument cannot be copied.
    """
    args, kwargs = _copied(model, *split(inputs))
    if place is not None:
        args, kwargs = pytree.tree_map_only(Tensor, place, (args, kwargs))
    if "use_cache" not in kwargs and _accepts_cache_flag(model):
        kwargs["use_cache"] = False
    return (model if run is None else run)(*args, **kwargs)


def refuse_lazy(model: nn.Module) -> None:
    """Raise an InputError where a parameter or buffer has no values yet."""
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if is_lazy(tensor):
            path = name.rpartition(".")[0]
            raise InputError(
                f"{name} has no values yet",
                expected="a model whose parameters have their shapes",
                found=f"{type(model.get_submodule(path)).__name__} at {path or '.'}, a lazy module that never ran",
                hint="run it once first: model(inputs)",
            )


def split(inputs: Inputs) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Positional and keyword arguments for `inputs`, as they are.

    Raises:
        InputError: if `inputs` is None.
    """
    if inputs is None:
        raise InputError("no inputs were given", hint="pass inputs= a tensor, a tuple or a dict")
    if isinstance(inputs, Mapping):
        return (), dict(inputs)
    if isinstance(inputs, (tuple, list)):
        return tuple(inputs), {}
    return (inputs,), {}


def _copied(model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[list[Any], dict[str, Any]]:
    memo: dict[int, Any] = {}
    if not all(type(leaf) in _PLAIN for leaf in pytree.tree_leaves((args, dict(kwargs)))):
        memo = {id(part): part for part in (*model.modules(), *model.parameters(), *model.buffers())}
    with _disable_current_modes(), torch.no_grad(), _TensorCopies():
        positional = [_copy(value, str(place), memo) for place, value in enumerate(args)]
        return positional, {name: _copy(value, name, memo) for name, value in kwargs.items()}


def _copy(value: Any, name: str, memo: dict[int, Any]) -> Any:
    try:
        return copy.deepcopy(value, memo)
    except Exception as error:  # an object may refuse to be copied in any way; its own error is the cause
        raise InputError(
            f"the argument {name} cannot be copied, and a forward may change it",
            expected="arguments that copy.deepcopy can copy: every pass gets its own",
            found=f"{type(value).__name__}: {type(error).__name__}: {error}",
        ) from error


class _TensorCopies(TorchFunctionMode):
    """Makes a deep copy of a tensor one of its values, also where torch refuses one (it has a history in autograd)."""

    def __torch_function__(self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not Tensor.__deepcopy__:
            return func(*args, **(kwargs or {}))
        tensor, memo = args
        memo[id(tensor)] = _values(tensor, memo).requires_grad_(tensor.requires_grad and tensor.is_leaf)
        return memo[id(tensor)]


def _values(tensor: Tensor, memo: dict[int, Any]) -> Tensor:
    plain = type(tensor) is Tensor and tensor.layout is torch.strided and not tensor.is_meta
    if not plain or tensor.is_conj() or tensor.is_neg():
        return tensor.detach().clone()
    storage = tensor.untyped_storage()
    if storage.nbytes() > _SPARE * tensor.nbytes:
        return tensor.detach().clone()
    empty = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    shared = copy.deepcopy(storage, memo)  # once for all tensors that live in it
    return empty.set_(shared, tensor.storage_offset(), tensor.shape, tensor.stride())


def _accepts_cache_flag(model: nn.Module) -> bool:
    try:
        return "use_cache" in inspect.signature(model.forward).parameters
    except (TypeError, ValueError):  # a forward written in C has no signature to read
        return False
