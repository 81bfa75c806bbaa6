"""Which elements share one statistic: those that move when one of them is moved."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from normprobe.norms.reference import mean_square

KICK = 40.0  # how far one element is moved, in the input's root mean square: too far to be lost in float32


@dataclass(frozen=True)
class Layout:
    """The elements that share a statistic, as axes of `view`, in which a grouped axis is split in two.

    Attributes:
        shape: shape of the input.
        axes: reduced axes of `shape`, a grouped axis included.
        view: `shape`, with the grouped axis split into (groups, members).
        reduced: reduced axes of `view`.
        group_axis: the axis of `shape` that is split, None where there are no groups.
        groups: number of groups, None where there are no groups.
        part: (axis, start, stop) of the slice that is normalised where the rest is not, else None.
    """

    shape: tuple[int, ...]
    axes: tuple[int, ...]
    view: tuple[int, ...]
    reduced: tuple[int, ...]
    group_axis: int | None = None
    groups: int | None = None
    part: tuple[int, int, int] | None = None

    @property
    def size(self) -> int:
        """Number of elements that share one statistic."""
        return prod(self.view[axis] for axis in self.reduced)

    def split(self, x: Tensor) -> Tensor:
        """`x`, cut to the normalised part, in the shape `view`."""
        if self.part is not None:
            axis, start, stop = self.part
            x = x.narrow(axis, start, stop - start)
        return x.reshape(self.view)

    def statistic(self, x: Tensor, centred: bool) -> tuple[Tensor, Tensor]:
        """Deviation and mean square of a tensor in the shape `view`."""
        return mean_square(x, self.reduced, centred=centred)


def moved(call: Callable[[Tensor], Tensor], x: Tensor, index: tuple[int, ...]) -> Tensor:
    """The indices, one row each, of the outputs that change when element `index` of x is moved by `KICK`, through
    zero: a bounded map may be flat on one side of it."""
    kicked = x.clone()
    kicked[index] += KICK * x.square().mean().sqrt() * (-1 if x[index] > 0 else 1)
    before, after = call(x), call(kicked)
    return (before != after).nonzero()


def layout_of(indices: Tensor, index: tuple[int, ...], shape: tuple[int, ...]) -> Layout | None:
    """The layout whose statistic at `index` is shared by exactly the elements `indices`; None where none is.

    An axis is reduced as a whole or not at all; one may be reduced in aligned blocks (groups), or over one
    slice that is no block (a norm of a part of the features).
    """
    axes, extents, block, part = [], 1, None, None
    for axis, size in enumerate(shape):
        found = torch.unique(indices[:, axis])
        start, count = int(found[0]), len(found)
        extents *= count
        if count == 1:
            continue
        if int(found[-1]) - start + 1 != count:
            return None
        axes.append(axis)
        if count == size:
            continue
        if block is not None or part is not None:
            return None
        if size % count == 0 and start % count == 0:
            block = (axis, size // count)
        else:
            part = (axis, start, start + count)
    if extents != len(indices):
        return None
    return _assemble(shape, tuple(axes), block, part)


def _assemble(
    shape: tuple[int, ...],
    axes: tuple[int, ...],
    block: tuple[int, int] | None,
    part: tuple[int, int, int] | None,
) -> Layout:
    if part is not None:
        view = (*shape[: part[0]], part[2] - part[1], *shape[part[0] + 1 :])
        return Layout(shape, axes, view, axes, part=part)
    if block is None:
        return Layout(shape, axes, shape, axes)
    axis, groups = block
    view = (*shape[:axis], groups, shape[axis] // groups, *shape[axis + 1 :])
    reduced = tuple(a + (a >= axis) for a in axes)
    return Layout(shape, axes, view, reduced, axis, groups)
