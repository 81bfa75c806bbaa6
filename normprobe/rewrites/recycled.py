"""Memory that is used again: a system takes longer to clear fresh memory than a fold takes to fill it."""

from __future__ import annotations

import weakref
from math import prod
from threading import RLock
from typing import Any, final

import numpy as np
import torch
from torch import Tensor

_WORTH_IT = 1 << 22  # bytes, from which on an allocator gives memory back to the system
_WASTE = 3  # times what is asked for, at most
_MOST = 1 << 28  # bytes that are kept for later
_ALIGNED = 64  # bytes, as torch aligns its own: kernels may sum in another order elsewhere


@final
class Recycled:
    """Memory of tensors on the processor, taken back once nothing refers to one any more."""

    def __init__(self) -> None:
        self._spare: list[Any] = []  # the largest first
        self._lock = RLock()  # the last to let go of a tensor may be any thread, and this one in the midst of it

    def empty(self, shape: torch.Size, dtype: torch.dtype, device: torch.device) -> Tensor:
        """As `torch.empty`; memory that is too small for it is given up."""
        size = prod(shape) * dtype.itemsize
        if size < _WORTH_IT or device.type != "cpu":
            return torch.empty(shape, dtype=dtype, device=device)
        memory = self._fitting(size + _ALIGNED)
        start = -memory.ctypes.data % _ALIGNED
        used = memory[start : start + size]
        weakref.finalize(used, self._take_back, memory).atexit = False
        return torch.from_numpy(used).view(dtype).reshape(shape)

    def _fitting(self, size: int) -> Any:
        """The smallest that is there and large enough, or a new one."""
        with self._lock:
            fitting = [each for each in self._spare if size <= each.nbytes <= _WASTE * size]
            self._spare = [each for each in self._spare if each is not fitting[-1]] if fitting else []
        return fitting[-1] if fitting else np.empty(size, dtype=np.uint8)

    def _take_back(self, memory: Any) -> None:
        """Keep it, the largest first, as far as there is room."""
        with self._lock:
            spare, self._spare = sorted((*self._spare, memory), key=lambda each: -each.nbytes), []
            for each in spare:
                if sum(kept.nbytes for kept in self._spare) + each.nbytes <= _MOST:
                    self._spare.append(each)
