"""What the sites of a model share: memory, as a large tensor that is asked for anew comes in fresh pages, which cost
more than filling them; and what was made of the same things before."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

Made = TypeVar("Made")


class Scratch:
    """One piece of memory for each purpose; what is taken is good until the same is taken again."""

    def __init__(self) -> None:
        self._pieces: dict[tuple[str, torch.dtype, torch.device], Tensor] = {}
        self._made: dict[str, tuple[tuple[object, ...], Any]] = {}

    def take(self, purpose: str, shape: Sequence[int], like: Tensor) -> Tensor:
        """A tensor of this shape, with the dtype and device of `like`, that holds anything."""
        key, size = (purpose, like.dtype, like.device), math.prod(shape)
        piece = self._pieces.get(key)
        if piece is None or piece.numel() < size:
            piece = self._pieces[key] = like.new_empty(size)
        return piece[:size].view(*shape)

    def made(self, purpose: str, of: tuple[object, ...], make: Callable[[], Made]) -> Made:
        """What `make` gives; what it gave the last time where it is made of the same tensors and equal other things."""
        known = self._made.get(purpose)
        if known is None or not all(map(_same, known[0], of)):
            known = self._made[purpose] = (of, make())
        made: Made = known[1]
        return made


def _same(a: object, b: object) -> bool:
    return a is b or (not (isinstance(a, Tensor) or isinstance(b, Tensor)) and a == b)
