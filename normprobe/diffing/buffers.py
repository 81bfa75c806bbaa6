"""The values of floating buffers in two models: tables of rotary angles, running statistics."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor, nn

from normprobe.capture.storage import widened
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

    They belong together by name where both models have the same names. Else those of equal values do, then those of one
    name where not all are left of the same shapes, and then all in the order in which they are registered.

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
    if set(map(_name, a)) == set(map(_name, b)):
        return _apart(a, b, _name)[0], ([], [])
    pairs, a, b = _apart(a, b, _values)
    if _shapes(a) != _shapes(b):
        named, a, b = _apart(a, b, _name)
        pairs += named
    if _shapes(a) != _shapes(b):
        return pairs, (a, b)
    return [*pairs, *zip(a, b, strict=True)], ([], [])


def _apart(
    a: _Named, b: _Named, key: Callable[[_Buffer], object]
) -> tuple[list[tuple[_Buffer, _Buffer]], _Named, _Named]:
    """Pairs of one key, first with first, and what is left of both models."""
    waiting: dict[object, list[_Buffer]] = {}
    for one in b:
        waiting.setdefault(key(one), []).append(one)
    found = [(one, held.pop(0)) for one in a if (held := waiting.get(key(one)))]
    taken = {one[0] for one, _ in found}, {other[0] for _, other in found}
    return found, [one for one in a if one[0] not in taken[0]], [one for one in b if one[0] not in taken[1]]


def _name(held: _Buffer) -> object:
    return held[0], held[1].shape


def _values(held: _Buffer) -> object:
    values = widened(held[1].detach()).to("cpu", torch.float64)
    return held[1].shape, hashlib.blake2b(values.contiguous().numpy().data).digest()


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
