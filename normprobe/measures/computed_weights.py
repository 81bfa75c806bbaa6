"""The sizes of what computed weights are made from: nothing runs for them."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from normprobe.anatomy.norm_sites.reparametrizations import size_of
from normprobe.measures.values import plain
from normprobe.records import Anatomy, ComputedWeight, Reparametrization, Skipped


def measure_computed_weights(
    model: nn.Module, anatomy: Anatomy
) -> tuple[tuple[ComputedWeight, ...], tuple[Skipped, ...]]:
    """The slices behind every computed weight of `anatomy`.

    Args:
        model: the model that `anatomy` was read from.
        anatomy: its reparametrizations.

    Returns:
        One record a computed weight in the order of the Anatomy, and those that could not be read with the reason.
    """
    tensors = dict(model.named_parameters(remove_duplicate=False))
    found: list[ComputedWeight] = []
    skipped: list[Skipped] = []
    for one in anatomy.reparametrizations:
        held = [tensors.get(name) for name in (one.parameter, one.gain) if name is not None]
        readable = [tensor for tensor in held if plain(tensor)]
        if len(readable) == len(held):
            found.append(_read(one, readable[0], readable[1] if one.gain is not None else None))
        else:
            why = "its values are no plain numbers of 16 bits or more"
            skipped.append(Skipped(what=f"computed weight of {one.path}", why=why))
    return tuple(found), tuple(skipped)


@torch.no_grad()
def _read(one: Reparametrization, stored: Tensor, gain: Tensor | None) -> ComputedWeight:
    wide = stored.detach().cpu().double()
    others = [i for i in range(wide.dim()) if i not in one.axes]
    sizes = size_of(wide, one.axes, one.kind).flatten()
    empty = _empty(one, stored.detach().cpu(), wide)
    slices = wide.permute(*others, *one.axes).reshape(sizes.numel(), -1)
    finite = slices.isfinite().all(1)
    known = torch.where(finite, sizes, math.inf)
    at = int(known.argmin())
    return ComputedWeight(
        path=one.path,
        parameter=one.parameter,
        dtype=str(stored.dtype).removeprefix("torch."),
        count=sizes.numel(),
        elements=slices.shape[1],
        non_finite=int((~finite).sum()),
        empty=int((empty & finite).sum()),
        smallest=float(sizes[at]) if bool(finite.any()) else math.nan,
        smallest_at=at,
        median=float(sizes[finite].median()) if bool(finite.any()) else math.nan,
        gains=0 if gain is None else gain.numel(),
        zero_gains=0 if gain is None else int((gain == 0).sum()),
    )


def _empty(one: Reparametrization, stored: Tensor, wide: Tensor) -> Tensor:
    """Which slices have no size."""
    if one.kind != "weight_standardization":
        return size_of(stored, one.axes, one.kind).flatten() == 0
    largest = wide.abs().amax(dim=one.axes) if one.axes else wide.abs()
    deviation = size_of(wide, one.axes, one.kind).flatten()
    return deviation <= torch.finfo(stored.dtype).eps * largest.flatten()
