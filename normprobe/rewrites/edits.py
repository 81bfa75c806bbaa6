"""Give parameters other values in place, so that they keep their identity, and keep what undo needs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from fnmatch import fnmatchcase
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from normprobe.errors import RewriteError

PART = 1 << 15  # elements that are written at a time: few enough that float64 stays in the cache


class ForGood(ExitStack):
    """Takes no way back, for a model that is thrown away afterwards: old values need no memory."""

    def callback(self, callback: Any, /, *args: Any, **kwds: Any) -> Any:
        """Nothing is kept."""
        return callback


def set_values(parameter: Tensor, values: Tensor | Callable[[], Iterable[Tensor]], undo: ExitStack) -> None:
    """Give `parameter` the `values`, in its dtype and on its device; `undo` writes the old ones back, bit for bit.

    Tied parameters are one tensor: writing it once is enough.

    Args:
        parameter: keeps its identity; where nothing is taken back, its memory is another one afterwards.
        values: of its shape; or what makes parts of them one after the other, so that a large parameter takes little
            memory in a wider dtype.
        undo: what takes changes back.

    Raises:
        RewriteError: the shapes differ, or a value that was finite is not finite in the parameter's dtype.
    """
    if isinstance(values, Tensor):
        if parameter.shape != values.shape:
            raise RewriteError(
                "cannot write a parameter", expected=f"shape {tuple(parameter.shape)}", found=str(tuple(values.shape))
            )
        values = partial(parts_of, values.detach())
    written = _cast(parameter, values)
    if isinstance(undo, ForGood):
        parameter.data = written  # the old memory may be mapped from a file, whose pages a write would copy
        return
    undo.callback(_write, parameter, parameter.detach().clone())
    _write(parameter, written)


def parts_of(tensor: Tensor) -> Iterator[Tensor]:
    """The elements of `tensor` in order, a few at a time."""
    flat = tensor.reshape(-1)
    return (flat[start : start + PART] for start in range(0, len(flat), PART))


def _cast(parameter: Tensor, values: Callable[[], Iterable[Tensor]]) -> Tensor:
    """Parts as one tensor like `parameter`."""
    found = torch.empty(parameter.shape, dtype=parameter.dtype, device=parameter.device)
    flat, done = found.view(-1), 0
    for part in values():
        size = part.numel()
        if done + size <= len(flat):
            flat[done : done + size].copy_(part.reshape(-1))
        done += size
    if done != len(flat):
        raise RewriteError("cannot write a parameter", expected=f"{len(flat)} values", found=str(done))
    if (
        done
        and not found.is_meta
        and not (found.is_floating_point() and bool(torch.stack(torch.aminmax(flat)).isfinite().all()))
    ):
        _check_finite(flat, values())
    return found


def _check_finite(cast: Tensor, parts: Iterable[Tensor]) -> None:
    """No value that was finite may have become infinite."""
    done = 0
    for part in parts:
        place = cast[done : done + part.numel()]
        if bool((part.reshape(-1).isfinite().to(cast.device) & ~place.isfinite()).any()):
            raise RewriteError(
                f"cannot write a parameter in {str(cast.dtype)[6:]}",
                expected=f"|values| up to {torch.finfo(cast.dtype).max:.3g}",
                found=f"{float(part.abs().amax()):.3g}",
                hint="convert the model to a wider dtype first",
            )
        done += part.numel()


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
