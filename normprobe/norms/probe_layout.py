"""Find the layout of a subject by moving single elements."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from normprobe.norms.layout import Layout, layout_of, moved

Call = Callable[[Tensor], Tensor]


def find_layout(call: Call, x: Tensor) -> Layout | None:
    """The layout of the statistic that `call` uses; without axes where every element is on its own.

    The middle, the first and the last element are moved. None where the outputs that move are no box of axes
    and groups around the element, or differ between elements in another way than a normalised part does.
    """
    shape = tuple(x.shape)
    corners = (tuple(n // 2 for n in shape), (0,) * len(shape), tuple(n - 1 for n in shape))
    places = tuple(dict.fromkeys(corners))
    layouts = [_at(call, x, place) for place in places]
    found = [layout for layout in layouts if layout is not None]
    if len(found) < len(layouts):
        return None
    shared = [(layout, place) for layout, place in zip(found, places, strict=False) if layout.axes]
    if not shared:
        return found[0]
    first = shared[0][0]
    if len(shared) < len(found) or first.part is not None:
        slices = {_as_slice(layout, place) for layout, place in shared}
        return slices.pop() if len(slices) == 1 else None
    same = {(layout.axes, layout.groups, layout.group_axis) for layout, _ in shared}
    return first if len(same) == 1 else None


def _at(call: Call, x: Tensor, place: tuple[int, ...]) -> Layout | None:
    indices = moved(call, x, place)
    if not bool((indices == torch.tensor(place, device=indices.device)).all(1).any()):
        return None
    return layout_of(indices, place, tuple(x.shape))


def _as_slice(layout: Layout, place: tuple[int, ...]) -> Layout | None:
    """The block around `place` as a slice of its axis; None where whole axes are reduced."""
    if layout.part is not None or layout.group_axis is None or layout.groups is None:
        return layout if layout.part is not None else None
    axis, size = layout.group_axis, layout.shape[layout.group_axis] // layout.groups
    start = place[axis] // size * size
    view = (*layout.shape[:axis], size, *layout.shape[axis + 1 :])
    return Layout(layout.shape, layout.axes, view, layout.axes, part=(axis, start, start + size))
