"""Memory that is used again: a system takes longer to clear fresh memory than a fold takes to fill it."""

from __future__ import annotations

import weakref
from math import prod
from typing import Any, final

import numpy as np
import torch
from torch import Tensor

_WORTH_IT = 1 << 22  # bytes, from which on an allocator gives memory back to the system
_ALIGNED = 64  # bytes, as torch aligns its own: kernels may sum in another order elsewhere


@final
class Recycled:
    """Memory of tensors on the processor, taken back once nothing refers to one any more."""

    def __init__(self) -> None:
        self._spare: list[Any] = []

    def empty(self, shape: torch.Size, dtype: torch.dtype, device: torch.device) -> Tensor:
        """As `torch.empty`; memory that is too small for it is given up."""
        size = prod(shape) * dtype.itemsize
        if size < _WORTH_IT or device.type != "cpu":
            return torch.empty(shape, dtype=dtype, device=device)
        fitting = sorted((each for each in self._spare if each.nbytes >= size + _ALIGNED), key=lambda each: each.nbytes)
        if fitting:
            memory = fitting[0]
            self._spare = [each for each in self._spare if each is not memory]
        else:
            self._spare = []
            memory = np.empty(size + _ALIGNED, dtype=np.uint8)
        start = -memory.ctypes.data % _ALIGNED
        used = memory[start : start + size]
        weakref.finalize(used, self._take_back, memory).atexit = False
        return torch.from_numpy(used).view(dtype).reshape(shape)

    def _take_back(self, memory: Any) -> None:
        self._spare.append(memory)
