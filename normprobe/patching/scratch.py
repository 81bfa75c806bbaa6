"""What is made of weights while a model is loaded lies on the disk, as the weights do that are mapped from theirs.

transformers stacks the experts of a layer, joins projections and casts as it loads, into memory that no file holds.
Here such parameters go to files that have no name any more: the system takes their room back when the last tensor goes,
however the process ends.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.utils import _pytree as pytree

from normprobe.capture.modes import DispatchMode
from normprobe.checkpoints.disk import check_free
from normprobe.checkpoints.output import WORTH_IT
from normprobe.checkpoints.shard import reserve
from normprobe.errors import CheckpointError

_INTO: Mapping[Any, Any] = {  # what makes a tensor larger than any that it reads
    torch.ops.aten.cat.default: torch.ops.aten.cat.out,
    torch.ops.aten.stack.default: torch.ops.aten.stack.out,
}
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_THREADS = "HF_DEACTIVATE_ASYNC_LOAD"


@final
class Scratch:
    """Tensors in files of their own, without a name, in `folder`; in memory where an open file cannot lose its name.

    Args:
        folder: it exists.
        alone: whether nothing else will be written to its disk.
    """

    def __init__(self, folder: Path, alone: bool = False) -> None:
        self.folder, self._alone = folder, alone
        self._spare = 0
        self._refused: CheckpointError | None = None

    def placed(self, tensor: Tensor) -> Tensor:
        """A tensor with the same values that lies in a file; itself where it does already or is not worth one.

        Raises:
            CheckpointError: the disk has too little room, or its files cannot be mapped.
        """
        worth_it = tensor.device.type == "cpu" and tensor.is_floating_point() and tensor.nbytes >= WORTH_IT
        if os.name != "posix" or not worth_it or tensor.untyped_storage().filename is not None:
            return tensor
        return self.empty(tensor.shape, tensor.dtype).copy_(tensor)

    @contextmanager
    def placing(self, mapped: Iterable[Tensor] = (), like: nn.Module | None = None, spare: int = 0) -> Iterator[None]:
        """Within the block, parameters that modules get are `placed`.

        Args:
            mapped: tensors that lie in files; parameters that share their memory stay where they are.
            like: a parameter with the very bits of one of these parameters shares the memory of that one instead.
            spare: bytes that the disk needs to have for what will be written besides.

        Raises:
            CheckpointError: as `placed`.
        """
        self._spare = 0 if self._alone else spare
        placing = _Placing(self, mapped, like)
        handle = register_module_parameter_registration_hook(placing.registered)
        try:
            with _one_after_the_other(), _Joining(self):
                yield
        finally:
            handle.remove()
            self._spare = 0
            if self._refused is not None:  # transformers would call it a fault of the checkpoint
                raise self._refused

    def empty(self, shape: torch.Size, dtype: torch.dtype) -> Tensor:
        """A tensor in a file, without values.

        Raises:
            CheckpointError: as `placed`.
        """
        try:
            return self._file(shape.numel() * dtype.itemsize).view(dtype).reshape(shape)
        except CheckpointError as error:
            self._refused = self._refused or error
            raise

    def _file(self, size: int) -> Tensor:
        what = f"{self.folder.parent}: no place for weights that are converted as they are loaded"
        check_free(self.folder, what, {"the next of them": size, "the new files": self._spare})
        try:
            descriptor, path = tempfile.mkstemp(prefix=".scratch-", dir=self.folder)
            try:
                reserve(descriptor, size)
                return torch.from_file(path, shared=True, size=size, dtype=torch.uint8)
            finally:
                os.unlink(path)
                os.close(descriptor)
        except (OSError, RuntimeError) as error:  # torch says by the second that files cannot be mapped
            raise CheckpointError(what, found=str(error), hint="name a place on another disk") from error


class _Placing:
    """Is told of parameters as modules get them, and says where they lie."""

    def __init__(self, scratch: Scratch, mapped: Iterable[Tensor], like: nn.Module | None) -> None:
        self._scratch = scratch
        self._mapped = {tensor.untyped_storage().data_ptr() for tensor in mapped}
        self._like: dict[tuple[torch.Size, torch.dtype], list[Tensor]] = {}
        for each in filter(Tensor.is_floating_point, like.parameters() if like is not None else ()):
            self._like.setdefault((each.shape, each.dtype), []).append(each.detach())

    def registered(self, module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        """As torch calls it."""
        if parameter is None or parameter.is_meta or parameter.untyped_storage().data_ptr() in self._mapped:
            return
        data = parameter.detach()
        same = (each for each in self._like.get((data.shape, data.dtype), ()) if _same_bits(each, data))
        found = next(same, None)
        parameter.data = self._scratch.placed(data) if found is None else found


class _Joining(DispatchMode):
    """Tensors that are joined out of many are made in their file, not in memory."""

    def __init__(self, scratch: Scratch) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._scratch = scratch

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        """As torch calls it."""
        kwargs = kwargs or {}
        tensors = args[0] if func in _INTO else ()
        if os.name != "posix" or not tensors or any(each.device.type != "cpu" for each in tensors):
            return func(*args, **kwargs)
        made = func(*pytree.tree_map_only(Tensor, _without_values, args), **kwargs)
        if made.nbytes < WORTH_IT:
            return func(*args, **kwargs)
        return _INTO[func](*args, **kwargs, out=self._scratch.empty(made.shape, made.dtype))


def _without_values(tensor: Tensor) -> Tensor:
    return torch.empty_like(tensor, device="meta")


def _same_bits(a: Tensor, b: Tensor) -> bool:
    integers = _INTEGERS[a.element_size()]
    return a.device == b.device and torch.equal(a.view(integers), b.view(integers))


@contextmanager
def _one_after_the_other() -> Iterator[None]:
    """transformers converts when a parameter is set, not ahead in threads, faster than the disk takes it."""
    before = os.environ.get(_THREADS)
    os.environ[_THREADS] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[_THREADS]
        else:
            os.environ[_THREADS] = before
