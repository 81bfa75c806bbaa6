"""Which tokens of the inputs are padding, as the caller's masks say."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from normprobe.capture.invoke import Inputs, split


def padding_masks(inputs: Inputs) -> tuple[Tensor, ...]:
    """True for padding, [B, S] each: from every keyword argument that is a mask of zeros and ones over tokens.

    These are `attention_mask` (0: padding) and `key_padding_mask` (True: padding), with any prefix, as transformers
    and torch define them. A mask that hides nothing is left out.
    """
    found = []
    for name, value in split(inputs)[1].items():
        if not isinstance(value, Tensor) or value.dim() != 2 or value.is_meta or value.is_floating_point():
            continue
        if name.endswith("key_padding_mask") and value.dtype is torch.bool:
            found.append(value)
        elif name.endswith("attention_mask") and bool(((value == 0) | (value == 1)).all()):
            found.append(value == 0)
    return tuple(mask for mask in found if bool(mask.any()) and not bool(mask.all()))


def fitting(masks: Sequence[Tensor], shape: tuple[int, int]) -> Tensor | None:
    """The one mask of this shape; None where there is none, or where two differ."""
    fits = [mask for mask in masks if tuple(mask.shape) == shape]
    return fits[0] if fits and all(torch.equal(fits[0], other) for other in fits[1:]) else None
