"""Which tokens of the inputs are padding, as the caller's masks say."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from normprobe.capture.invoke import Inputs, split
from normprobe.records import Skipped

_SEQUENCES = "input_ids", "inputs_embeds"


def padding_masks(inputs: Inputs) -> tuple[Tensor, ...]:
    """True for padding, [B, S] each: from every keyword argument that is a mask of zeros and ones over tokens.

    These are `attention_mask` (0: padding) and `key_padding_mask` (True: padding), with any prefix, as transformers
    and torch define them. A mask that hides nothing, and that of a sequence which has none, is there only beside one
    of the same shape that hides something.
    """
    named = split(inputs)[1]
    found = [mask for name, value in named.items() if (mask := _padding(name, value)) is not None]
    found += [_none(value) for name, value in named.items() if _unmasked(name, value, named)]
    hiding = {tuple(mask.shape) for mask in found if bool(mask.any())}
    return tuple(mask for mask in found if tuple(mask.shape) in hiding)


def _padding(name: str, value: object) -> Tensor | None:
    """What an argument says is padding; None where it is no such mask, or one that hides everything."""
    if not isinstance(value, Tensor) or value.dim() != 2 or value.is_meta or value.is_floating_point():
        return None
    mask = None
    if name.endswith("key_padding_mask") and value.dtype is torch.bool:
        mask = value
    elif name.endswith("attention_mask") and bool(((value == 0) | (value == 1)).all()):
        mask = value == 0
    return None if mask is None or bool(mask.all()) else mask


def _unmasked(name: str, value: object, named: Mapping[str, object]) -> bool:
    """Whether an argument is a sequence of tokens without a mask of its own."""
    prefix = next((name.removesuffix(end) for end in _SEQUENCES if name.endswith(end)), None)
    if prefix is None or not isinstance(value, Tensor) or value.dim() < 2:
        return False
    return all(named.get(prefix + mask) is None for mask in ("attention_mask", "key_padding_mask"))


def _none(sequence: Tensor) -> Tensor:
    return torch.zeros(sequence.shape[:2], dtype=torch.bool, device=sequence.device)


def fitting(masks: Sequence[Tensor], shape: tuple[int, int]) -> Tensor | None:
    """The one mask of this shape; None where there is none, or where two differ."""
    fits = [mask for mask in masks if tuple(mask.shape) == shape]
    return fits[0] if fits and all(torch.equal(fits[0], other) for other in fits[1:]) else None


def counted(masks: Sequence[Tensor], shape: Sequence[int]) -> Tensor | None:
    """True at tokens that are no padding, of a shape that broadcasts to `shape`; None where no mask fits it.

    A mask [B, S] fits [B, S, …], else [B, …, S, …] with one axis between (heads, channels), else rows [B·S, C].
    """
    for axis in (1, 2):
        mask = fitting(masks, (shape[0], shape[axis])) if len(shape) > max(axis, 1) else None
        if mask is not None:
            sizes = [size if place in (0, axis) else 1 for place, size in enumerate(shape)]
            return ~mask.reshape(sizes)
    rows = [mask for mask in masks if len(shape) == 2 and mask.numel() == shape[0]]
    if not rows or fitting(masks, (rows[0].shape[0], rows[0].shape[1])) is None or len({m.shape for m in rows}) > 1:
        return None
    return ~rows[0].reshape(-1, 1)


def sampled(shape: Sequence[int], seed: int, most: int, masks: Sequence[Tensor] = ()) -> tuple[Tensor, int]:
    """Flat places of a seeded sample of the elements that are no padding, on the CPU, and how many there are in all.

    All in order where there are no more than `most`.
    """
    total = math.prod(shape)
    seen = counted(masks, shape)
    places = None if seen is None else seen.cpu().expand(*shape).reshape(-1).nonzero().flatten()
    count = total if places is None else len(places)
    at = torch.arange(count, device="cpu")
    if count > most:
        at = torch.randint(count, (most,), generator=torch.Generator().manual_seed(seed), device="cpu")
    return at if places is None else places[at], count


def undecided(masks: Sequence[Tensor]) -> tuple[Skipped, ...]:
    """Padding that is not left out, as two sequences of one shape have different masks."""
    shapes = dict.fromkeys((mask.shape[0], mask.shape[1]) for mask in masks)
    why = "the inputs hold two sequences of this shape with different masks: which tokens are which is not told"
    return tuple(
        Skipped(what=f"padding of {batch} × {length} tokens", why=why)
        for batch, length in shapes
        if fitting(masks, (batch, length)) is None
    )
