"""Which tensors hold numbers that can be read one by one."""

from __future__ import annotations

from typing import TypeGuard

import torch
from torch import Tensor, nn

_READ = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def plain(tensor: Tensor | None) -> TypeGuard[Tensor]:
    """Whether it holds plain numbers of 16 bits or more, at least one."""
    if tensor is None or type(tensor) not in (Tensor, nn.Parameter) or tensor.layout is not torch.strided:
        return False
    return tensor.dtype in _READ and tensor.numel() > 0 and not tensor.is_meta
