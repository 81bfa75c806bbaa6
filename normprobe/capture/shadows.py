"""Values that tensors on the meta device would hold, computed beside them as far as they can be known.

Inputs, constants and what follows from them alone (positions, masks, lengths) have a twin on the CPU. What depends on
weights or buffers that are on meta has none.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils.weak import WeakTensorKeyDictionary

from normprobe.capture.leaves import replaced, tensors
from normprobe.capture.storage import storage_of
from normprobe.capture.writes import written

_READS = frozenset({torch.ops.aten._local_scalar_dense.default, torch.ops.aten.equal.default})
READERS = frozenset({Tensor.tolist, Tensor.__format__, Tensor.numpy, Tensor.__array__})  # past the dispatcher
_LARGEST = 1 << 22  # elements; larger tensors have no twin
_META = torch.device("meta")
_CPU = torch.device("cpu")

Assumed = Callable[[Any, Any], None]


def on_meta(model: nn.Module) -> bool:
    """Whether all parameters of a model, or all buffers of one without any, are on the meta device."""
    devices = {p.device.type for p in model.parameters()} or {b.device.type for b in model.buffers()}
    return devices == {"meta"}


class Shadows:
    """The twins of a forward on the meta device.

    Args:
        assumed: told of an operation and its answer where values had to be assumed: ones in place of all unknown.
    """

    def __init__(self, assumed: Assumed) -> None:
        self._assumed = assumed
        self._twins: Any = WeakTensorKeyDictionary()
        self._ids: set[int] = set()  # of all tensors that ever had a twin: most never have, and are told apart fast
        self._lost: dict[int, Tensor] = {}  # twins by storage, into which something unknown was written

    def to_meta(self, tensor: Tensor) -> Tensor:
        """An input of the model, moved to the meta device."""
        if tensor.is_meta:
            return tensor
        with _disable_current_modes():
            moved = tensor.to(_META)
        self._bind(moved, tensor)
        return moved

    def known(self, tensor: Tensor) -> Tensor | None:
        """The values of `tensor`; None where they are not known."""
        if not tensor.is_meta:
            return tensor
        twin: Tensor | None = self._twins.get(tensor) if id(tensor) in self._ids else None
        return None if twin is None or _storage(twin) in self._lost else twin

    def together(self, args: Any, kwargs: Any, changed: Sequence[Tensor] = ()) -> Any:
        """Arguments on one device: tensors that the forward made on the CPU join the others on meta."""
        places = {t.is_meta for t in tensors((args, kwargs))}
        if len(places) < 2 or not all(t.is_meta for t in changed):
            return args, kwargs
        return replaced((args, kwargs), lambda t: self.to_meta(t) if t.dim() else t)

    def run(
        self, function: Any, args: Sequence[Any], kwargs: Any, given: Sequence[Tensor], changed: Sequence[Tensor]
    ) -> Any:
        """Run one ATen call, and the same on the twins; what reads values, or cannot run on meta, on these alone.

        Of the tensors among the arguments, which are `given`, it writes into those that are `changed`.
        """
        places = [t.is_meta for t in given]
        meta = True in places
        if meta and False in places:
            args, kwargs = self.together(args, kwargs, changed)
            given = tensors((args, kwargs))
        if meta and function in _READS:
            return self._answer(function, args, kwargs)
        try:
            output = function(*args, **kwargs)
        except NotImplementedError:
            return self._answer(function, args, kwargs)
        if meta or any([t.is_meta for t in tensors(output)]):
            self._follow(function, args, kwargs, given, changed, output)
        return output

    def read(self, function: Any, args: Any, kwargs: Any) -> Any:
        """Answer one of `READERS`, which hand values over to Python."""
        return self._answer(function, args, kwargs)

    def _follow(
        self, function: Any, args: Any, kwargs: Any, given: Sequence[Tensor], changed: Sequence[Tensor], output: Any
    ) -> None:
        if any(self.known(t) is None for t in given) or self._own(function, changed, output):
            self._lose(changed)
            return
        try:
            made = self._on_twins(function, args, kwargs, self.known)
        except (RuntimeError, TypeError, ValueError, IndexError):  # a kernel that the CPU lacks, say
            self._lose(changed)
            return
        for tensor, twin in zip(tensors(output), tensors(made), strict=True):
            self._bind(tensor, twin)

    def _own(self, function: Any, changed: Sequence[Tensor], output: Any) -> bool:
        """Whether the twins would not come to the same result: random numbers, or too large, or written elsewhere."""
        large = any(t.numel() > _LARGEST for t in tensors(output))
        random = torch.Tag.nondeterministic_seeded in getattr(function, "tags", ())
        return large or random or not all(t.is_meta for t in changed)

    def _answer(self, function: Any, args: Any, kwargs: Any) -> Any:
        """The result on the CPU, with ones for what is not known; integers found so are known from now on."""
        changed = written(function, args, kwargs)
        origin: dict[int, Tensor] = {}
        guessed = []

        def value(tensor: Tensor) -> Tensor:
            twin = self.known(tensor)
            if twin is None:
                guessed.append(tensor)
                twin = _ones(tensor, writable=any(tensor is t for t in changed))
            origin[id(twin)] = tensor
            return twin

        made = self._on_twins(function, args, kwargs, value)
        if guessed:
            self._lose(changed)
            if _decides(guessed, [t for t in tensors((args, kwargs)) if self.known(t) is not None]):
                self._assumed(function, made)
        return replaced(made, lambda t: self._made(t, origin, exact=not guessed))

    def _made(self, twin: Tensor, origin: dict[int, Tensor], *, exact: bool) -> Tensor:
        if id(twin) in origin:  # written in place
            return origin[id(twin)]
        with _disable_current_modes():
            tensor = twin.to(_META)
        if exact or not twin.is_floating_point():
            self._bind(tensor, twin)
        return tensor

    def _on_twins(self, function: Any, args: Any, kwargs: Any, value: Callable[[Tensor], Tensor | None]) -> Any:
        twins = replaced((args, kwargs), value)
        twins = replaced(twins, lambda d: _CPU if d == _META else d, torch.device)
        with _disable_current_modes(), torch.no_grad():
            return function(*twins[0], **twins[1])

    def _bind(self, tensor: Tensor, twin: Tensor) -> None:
        if tensor.is_meta and twin is not tensor:
            self._twins[tensor] = twin
            self._ids.add(id(tensor))

    def _lose(self, tensors: Sequence[Tensor]) -> None:
        for tensor in tensors:
            twin = self._twins.get(tensor)
            if twin is not None:
                self._lost[_storage(twin)] = twin


def _decides(unknown: Sequence[Tensor], known: Sequence[Tensor]) -> bool:
    """Whether a result's shape hangs on unknown values: on indices, or on numbers that no known index picks from."""
    return any(not t.is_floating_point() for t in unknown) or all(t.is_floating_point() for t in known)


def _ones(tensor: Tensor, *, writable: bool) -> Tensor:
    one = torch.ones((), dtype=tensor.dtype).expand(tensor.shape)
    return one.clone() if writable else one


def _storage(tensor: Tensor) -> int:
    storage = storage_of(tensor)
    return id(tensor) if storage is None else int(storage._cdata)
