"""Give parameters other values in place, so that they keep their identity, and keep what undo needs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn

from normprobe.capture.writes import writable
from normprobe.errors import RewriteError
from normprobe.rewrites.recycled import Recycled
from normprobe.rewrites.threads import side_by_side

PART = 1 << 15  # elements that are written at a time: few enough that float64 stays in the cache
_BLOCK = 1 << 18  # elements that a thread writes before it takes others


@dataclass(frozen=True)
class Parts:
    """Values of a tensor in the order of memory, a few at a time, so that a large one takes little memory in a wider
    dtype; threads make them side by side.

    Attributes:
        size: elements of a part; the last may have fewer.
        make: gives the part that begins at this element.
    """

    size: int
    make: Callable[[int], Tensor]

    @classmethod
    def of(cls, tensor: Tensor) -> Parts:
        """Those of a tensor that is there."""
        flat = tensor.detach().reshape(-1)
        return cls(PART, lambda start: flat[start : start + PART])


class ForGood(ExitStack):
    """Takes no way back, for a model that is thrown away afterwards: old values need no memory, which new ones take."""

    def __init__(self) -> None:
        super().__init__()
        self.memory = Recycled()

    def callback(self, callback: Any, /, *args: Any, **kwds: Any) -> Any:
        """Nothing is kept."""
        return callback


def set_values(parameter: Tensor, values: Tensor | Parts, undo: ExitStack) -> None:
    """Give `parameter` the `values`, in its dtype and on its device; `undo` writes the old ones back, bit for bit.

    Tied parameters are one tensor: writing it once is enough.

    Args:
        parameter: keeps its identity; where nothing is taken back, its memory is another one afterwards.
        values: of its shape, or as many in parts.
        undo: what takes changes back.

    Raises:
        RewriteError: the shapes differ, or a value that was finite is not finite in the parameter's dtype.
    """
    if isinstance(values, Tensor):
        if parameter.shape != values.shape:
            raise RewriteError(
                "cannot write a parameter", expected=f"shape {tuple(parameter.shape)}", found=str(tuple(values.shape))
            )
        values = Parts.of(values)
    fresh = undo.memory.empty if isinstance(undo, ForGood) else torch.empty
    with torch.inference_mode(False), torch.no_grad():  # threads write to it, which inference mode does not reach
        written = fresh(parameter.shape, dtype=parameter.dtype, device=parameter.device)
        _cast(written, values)
    if isinstance(undo, ForGood):
        parameter.data = written  # the old memory may be mapped from a file, whose pages a write would copy
        return
    undo.callback(_write, parameter, parameter.detach().clone())
    _write(parameter, written)


def parts_of(tensor: Tensor) -> Iterator[Tensor]:
    """The elements of `tensor` in order, a few at a time."""
    flat = tensor.reshape(-1)
    return (flat[start : start + PART] for start in range(0, len(flat), PART))


def _cast(into: Tensor, values: Parts) -> None:
    """Write parts to a tensor of another dtype; off the processor one after the other, in the caller's stream."""
    flat, block = into.view(-1), values.size * max(1, _BLOCK // values.size)

    def fill(start: int) -> Tensor:
        rows = flat[start : start + block]
        for place, part in _places(rows, start, values):
            place.copy_(part)
        return _finite(rows)

    threads = torch.get_num_threads() if into.is_cpu else 1
    finite = [*side_by_side(fill, range(0, len(flat), block), threads)]
    if finite and not into.is_meta and not bool(torch.stack(finite).all()):
        for place, part in _places(flat, 0, values):
            _check_finite(place, part)


def _places(flat: Tensor, start: int, values: Parts) -> Iterator[tuple[Tensor, Tensor]]:
    """Parts of `flat`, which begins at element `start` of all, each with the values that go there."""
    for done in range(0, len(flat), values.size):
        place, part = flat[done : done + values.size], values.make(start + done).reshape(-1)
        if len(part) != len(place):
            expected, found = f"{len(place)} values from {start + done} on", str(len(part))
            raise RewriteError("cannot write a parameter", expected=expected, found=found)
        yield place, part


def _finite(values: Tensor) -> Tensor:
    """Whether all are finite, where that can be told; 0-d."""
    if not values.is_floating_point():
        return values.isfinite().all()
    return torch.stack(torch.aminmax(values)).isfinite().all()


def _check_finite(cast: Tensor, values: Tensor) -> None:
    """No value that was finite may have become infinite."""
    if bool((values.isfinite().to(cast.device) & ~cast.isfinite()).any()):
        raise RewriteError(
            f"cannot write a parameter in {str(cast.dtype)[6:]}",
            expected=f"|values| up to {torch.finfo(cast.dtype).max:.3g}",
            found=f"{float(values.abs().amax()):.3g}",
            hint="convert the model to a wider dtype first",
        )


def _write(parameter: Tensor, values: Tensor) -> None:
    with writable(parameter):
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
