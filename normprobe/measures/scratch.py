"""Memory that is used again: a large tensor that is asked for anew comes in fresh pages, which cost more than filling
them."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor


class Scratch:
    """One piece of memory for each purpose; what is taken is good until the same is taken again."""

    def __init__(self) -> None:
        self._pieces: dict[tuple[str, torch.dtype, torch.device], Tensor] = {}

    def take(self, purpose: str, shape: Sequence[int], like: Tensor) -> Tensor:
        """A tensor of this shape, with the dtype and device of `like`, that holds anything."""
        key, size = (purpose, like.dtype, like.device), math.prod(shape)
        piece = self._pieces.get(key)
        if piece is None or piece.numel() < size:
            piece = self._pieces[key] = like.new_empty(size)
        return piece[:size].view(*shape)
