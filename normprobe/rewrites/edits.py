"""Give parameters other values in place, so that they keep their identity, and keep what undo needs."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import ExitStack
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn

from normprobe.errors import RewriteError


class ForGood(ExitStack):
    """Takes no way back, for a model that is thrown away afterwards: old values need no memory."""

    def callback(self, callback: Any, /, *args: Any, **kwds: Any) -> Any:
        """Nothing is kept."""
        return callback


def set_values(parameter: Tensor, values: Tensor, undo: ExitStack) -> None:
    """Write `values` into `parameter`, in its dtype and on its device; `undo` writes the old ones back, bit for bit.

    Tied parameters are one tensor: writing it once is enough.

    Raises:
        RewriteError: the shapes differ, or a value that was finite is not finite in the parameter's dtype.
    """
    if parameter.shape != values.shape:
        raise RewriteError(
            "cannot write a parameter", expected=f"shape {tuple(parameter.shape)}", found=str(tuple(values.shape))
        )
    cast = values.detach().to(device=parameter.device, dtype=parameter.dtype)
    if not cast.is_meta and bool((values.isfinite().to(cast.device) & ~cast.isfinite()).any()):
        raise RewriteError(
            f"cannot write a parameter in {str(parameter.dtype)[6:]}",
            expected=f"|values| up to {torch.finfo(parameter.dtype).max:.3g}",
            found=f"{float(values.abs().amax()):.3g}",
            hint="convert the model to a wider dtype first",
        )
    if not isinstance(undo, ForGood):
        undo.callback(_write, parameter, parameter.detach().clone())
    _write(parameter, cast)


@torch.no_grad()
def _write(parameter: Tensor, values: Tensor) -> None:
    parameter.copy_(values)


def bytes_of(model: nn.Module, names: tuple[str, ...]) -> int:
    """Memory that undo holds for these parameters, tied ones counted once."""
    return _size(model.get_parameter(name) for name in names)


def bytes_in(module: nn.Module) -> int:
    """Memory of all parameters and buffers inside a module, which undo holds once the module is out."""
    return _size((*module.parameters(), *module.buffers()))


def _size(tensors: Iterable[Tensor]) -> int:
    return sum(p.numel() * p.element_size() for p in {id(p): p for p in tensors}.values())


def chosen(place: str | tuple[str, ...], only: str | tuple[str, ...] | None) -> bool:
    """Whether a place, by one of its names, is meant by `only`: one pattern or several, with * and ? as in file names;
    None: every one."""
    patterns = (only,) if isinstance(only, str) else only
    names = (place,) if isinstance(place, str) else place
    return patterns is None or any(fnmatchcase(name, pattern) for name in names for pattern in patterns)


def choice(only: object) -> str | tuple[str, ...] | None:
    """What `only=` was given, as it is kept: a list as a tuple.

    Raises:
        RewriteError: it is neither text nor a list of texts, or empty.
    """
    if only is None or (isinstance(only, str) and only):
        return only
    if isinstance(only, (list, tuple)) and only and all(isinstance(word, str) and word for word in only):
        return tuple(only)
    expected = "only: one pattern of paths such as 'h.*.mlp.*', or several"
    raise RewriteError("a choice of places cannot be read", expected=expected, found=repr(only))
