"""What a forward takes by size: the largest few of a row, as a router takes experts, or a row in order.

Rounding swaps two that are nearly equal, and the outputs jump. To tell what a rewrite did besides, the rewritten model
is given the choice of the original in such rows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import repeat
from typing import Any, final

import torch
from torch import Tensor

from normprobe.capture.modes import DispatchMode

_DIM: Mapping[
    Any, tuple[int, int | None]
] = {  # operation: where its dimension stands among the arguments, if not given
    torch.ops.aten.topk.default: (2, -1),
    torch.ops.aten.sort.default: (1, -1),
    torch.ops.aten.sort.stable: (4, -1),
    torch.ops.aten.max.dim: (1, None),
    torch.ops.aten.min.dim: (1, None),
    torch.ops.aten.argmax.default: (1, None),
    torch.ops.aten.argmin.default: (1, None),
}


_DRAWS = 4  # two values, each as far off before as after


@dataclass
class Choices:
    """The choices of a forward of one model, in their order.

    Attributes:
        taken: each operation with the indices that it gave, and the values there.
    """

    taken: list[tuple[Any, Tensor, Tensor]] = field(default_factory=list)

    def given(self, most: float, least: float = 0.0, off: Sequence[float] = ()) -> Given:
        """A mode in which a forward is given these choices, where its own are nearly as good.

        Args:
            most: by how much of the larger one's magnitude two values may differ of which either is chosen.
            least: by how much of it they may in any case.
            off: `Given.off` of a forward without rounding; between `least` and `most`, values may differ by as much as
                two pairs can that are each as far from it. Without it they may differ by `most`.
        """
        return Given(self, most, least, off)


@final
class Noted(DispatchMode):
    """A mode in which the choices of a forward are noted.

    Attributes:
        choices: those, so far.
    """

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.choices = Choices()

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        """As torch calls it."""
        found = func(*args, **(kwargs or {}))
        dim = _dim(func, args, kwargs or {})
        if dim is not None:
            indices = _indices(found).clone()  # the model may write to its own
            self.choices.taken.append((func, indices, _at(indices, args[0], dim)))
        return found


@final
class Given(DispatchMode):
    """See `Choices.given`.

    Attributes:
        kept: rows in which the choice was given, since it was another by rounding.
        rows: in all, of as many choices as could be told apart.
        off: for each choice how far the values that were chosen before are from those that are there now.
    """

    supports_higher_order_operators = True

    def __init__(self, choices: Choices, most: float, least: float, off: Sequence[float]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        known = (*off, *repeat(float("inf"), len(choices.taken) - len(off)))
        self._left = list(zip(choices.taken, known, strict=True))[::-1]
        self._most, self._least = most, least
        self.kept, self.rows = 0, 0
        self.off: list[float] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        """As torch calls it."""
        found = func(*args, **(kwargs or {}))
        dim = _dim(func, args, kwargs or {})
        if dim is None or not self._left:
            return found
        (had_by, had, held), off = self._left.pop()
        own = _indices(found)
        if had_by is not func or had.shape != own.shape:
            self._left.clear()  # another model, whose choices are others
            return found
        self.off.append(_apart(_at(had, args[0], dim), held))
        return self._chosen(found, args[0], dim, had, off) if own.numel() else found

    def _chosen(self, found: Any, values: Tensor, dim: int, had: Tensor, off: float) -> Any:
        """What an operation gives, with the choice of before where it is nearly as good as its own."""
        own = _indices(found)
        flat = own.dim() < values.dim()
        own, had = (each.unsqueeze(dim) if flat else each for each in (own, had))
        near = self._near(values.gather(dim, own), values.gather(dim, had), off).all(dim, keepdim=True)
        keep = (own != had).any(dim, keepdim=True) & near
        self.rows += keep.numel()
        self.kept += int(keep.sum())
        indices = torch.where(keep, had, own)
        taken = [each.squeeze(dim) if flat else each for each in (values.gather(dim, indices), indices)]
        return taken[1] if isinstance(found, Tensor) else tuple(taken)

    def _near(self, a: Tensor, b: Tensor, off: float) -> Tensor:
        """Each beside its own alone: the row may hold numbers that stand for what is masked, far from all others."""
        larger = a.abs().maximum(b.abs()).double()
        larger = larger.where(larger.isfinite(), 0)
        most = (self._least * larger).clamp(min=_DRAWS * off).minimum(self._most * larger)
        return (a == b) | ((a.double() - b.double()).abs() <= most)


def _at(indices: Tensor, values: Tensor, dim: int) -> Tensor:
    """The values that were chosen."""
    flat = indices.dim() < values.dim()
    return values.gather(dim, indices.unsqueeze(dim) if flat else indices)


def _apart(a: Tensor, b: Tensor) -> float:
    """The largest difference; values that are infinite in both do not count."""
    return float((a.double() - b.double()).abs().nan_to_num(0.0).amax()) if a.numel() else 0.0


def _dim(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> int | None:
    """The dimension that an operation chooses along; None where it is no choice among floating numbers."""
    if func not in _DIM or not args[0].is_floating_point() or not args[0].dim():
        return None
    place, usual = _DIM[func]
    dim: int | None = kwargs.get("dim", args[place] if len(args) > place else usual)
    return None if dim is None else dim % args[0].dim()


def _indices(found: Any) -> Tensor:
    indices: Tensor = found if isinstance(found, Tensor) else found[1]
    return indices
