"""What a forward takes by size: the largest few of a row, as a router takes experts, or a row in order.

Rounding swaps two that are nearly equal, and the outputs jump. To tell what a rewrite did besides, the rewritten model
is given the choice of the original in such rows.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
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


@dataclass
class Choices:
    """The choices of a forward of one model, in their order.

    Attributes:
        taken: each operation with the indices that it gave.
    """

    taken: list[tuple[Any, Tensor]] = field(default_factory=list)

    def noted(self) -> AbstractContextManager[Any]:
        """Within the block those of the forward are added."""
        return _Noting(self)

    def given(self, nearly: float) -> Given:
        """A mode in which a forward is given these choices, where its own are nearly as good.

        Args:
            nearly: by how much of the larger one's magnitude two values may differ of which either is chosen.
        """
        return Given(self, nearly)


class _Noting(DispatchMode):
    def __init__(self, choices: Choices) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._choices = choices

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        """As torch calls it."""
        found = func(*args, **(kwargs or {}))
        if _dim(func, args, kwargs or {}) is not None:
            self._choices.taken.append((func, _indices(found).clone()))  # the model may write to its own
        return found


@final
class Given(DispatchMode):
    """See `Choices.given`.

    Attributes:
        kept: rows in which the choice was given, since it was another by rounding.
        rows: in all, of as many choices as could be told apart.
    """

    def __init__(self, choices: Choices, nearly: float) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._left = list(choices.taken)[::-1]
        self._nearly = nearly
        self.kept, self.rows = 0, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        """As torch calls it."""
        found = func(*args, **(kwargs or {}))
        dim = _dim(func, args, kwargs or {})
        if dim is None or not self._left:
            return found
        had_by, had = self._left.pop()
        own = _indices(found)
        if had_by is not func or had.shape != own.shape:
            self._left.clear()  # another model, whose choices are others
            return found
        return found if not own.numel() else self._chosen(found, args[0], dim, own, had)

    def _chosen(self, found: Any, values: Tensor, dim: int, own: Tensor, had: Tensor) -> Any:
        """What an operation gives, with the choice of before where it is nearly as good as its own."""
        flat = own.dim() < values.dim()
        own, had = (each.unsqueeze(dim) if flat else each for each in (own, had))
        near = self._near(values.gather(dim, own), values.gather(dim, had)).all(dim, keepdim=True)
        keep = (own != had).any(dim, keepdim=True) & near
        self.rows += keep.numel()
        self.kept += int(keep.sum())
        indices = torch.where(keep, had, own)
        taken = [each.squeeze(dim) if flat else each for each in (values.gather(dim, indices), indices)]
        return taken[1] if isinstance(found, Tensor) else tuple(taken)

    def _near(self, a: Tensor, b: Tensor) -> Tensor:
        """Each beside its own alone: the row may hold numbers that stand for what is masked, far from all others."""
        larger = a.abs().maximum(b.abs())
        return (a == b) | ((a - b).abs() <= self._nearly * larger.where(larger.isfinite(), 0))


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
