"""The values of floating buffers in two models: tables of rotary angles, running statistics."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor, nn

from normprobe.diffing.values import relate, rounding
from normprobe.records import Skipped
from normprobe.records.diff import Relation

_Buffer: TypeAlias = tuple[str, Tensor]
_Named: TypeAlias = list[_Buffer]
_SHOWN = 3  # names in one line


@dataclass(frozen=True)
class BufferPair:
    """One buffer of each model.

    Attributes:
        a: its name in A.
        b: its name in B.
        relation: of their values, as in `WeightPair`.
        short: the model (0 or 1) that holds what the other one's values are after rounding to `dtype`; None where
            neither does, or both were rounded.
        dtype: by name.
        error: the largest relative difference.
    """

    a: str
    b: str
    relation: Relation
    short: int | None = None
    dtype: str = ""
    error: float = 0.0


def compare_buffers(a: nn.Module, b: nn.Module, seed: int) -> tuple[tuple[BufferPair, ...], tuple[Skipped, ...]]:
    """Floating buffers that belong together, and what is said of others.

    They belong together in the order in which they are registered where the shapes in this order are the same in both
    models; else by name, and those that are left in their order again.

    Args:
        a: the first model.
        b: the second model.
        seed: as for `relate`.
    """
    pairs, left = _together(_held(a), _held(b))
    alone = [f"{name} of {model}" for model, side in zip("AB", left, strict=True) for name, _ in side]
    why = "in one model alone, or of other shapes: their values were not compared"
    more = f" and {len(alone) - _SHOWN} more" if len(alone) > _SHOWN else ""
    what = f"floating buffers: {', '.join(alone[:_SHOWN])}{more}"
    return tuple(_pair(*pair, seed) for pair in pairs), (Skipped(what=what, why=why),) if alone else ()


def _held(model: nn.Module) -> _Named:
    held = model.named_buffers()
    return [(name, t) for name, t in held if t.is_floating_point() and not t.is_meta and t.numel()]


def _together(a: _Named, b: _Named) -> tuple[list[tuple[_Buffer, _Buffer]], tuple[_Named, _Named]]:
    """The pairs, and those of each model that have no counterpart."""
    if _shapes(a) == _shapes(b):
        return list(zip(a, b, strict=True)), ([], [])
    other = dict(b)
    known = [(one, (one[0], other[one[0]])) for one in a if one[0] in other and other[one[0]].shape == one[1].shape]
    names = {one[0] for one, _ in known}
    left = [[one for one in side if one[0] not in names] for side in (a, b)]
    if _shapes(left[0]) != _shapes(left[1]):
        return known, (left[0], left[1])
    return [*known, *zip(*left, strict=True)], ([], [])


def _shapes(held: Sequence[_Buffer]) -> list[torch.Size]:
    return [values.shape for _, values in held]


def _pair(a: _Buffer, b: _Buffer, seed: int) -> BufferPair:
    one, other = (held[1].detach() if held[1].dim() else held[1].detach().reshape(1) for held in (a, b))
    relation, _, _ = relate(one, other, seed)
    if relation != "rounded":
        return BufferPair(a[0], b[0], relation)
    x, y = (held.to("cpu", torch.float64) for held in (one, other))
    told = rounding(x, y, {one.dtype, other.dtype})
    size = torch.maximum(x.abs(), y.abs())
    error = float(((x - y).abs() / size)[size > 0].max()) if bool((size > 0).any()) else 0.0
    if told is None:
        return BufferPair(a[0], b[0], relation, error=error)
    return BufferPair(a[0], b[0], relation, told[0], str(told[1]).removeprefix("torch."), error)
