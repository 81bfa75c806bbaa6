"""The elements that share a statistic are read from what moves."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from normprobe.norms.fit import rows
from normprobe.norms.layout import layout_of
from normprobe.norms.probe_layout import find_layout

SHAPE = (2, 12, 4, 5)
X = rows(SHAPE, 0)[0]


@pytest.mark.parametrize(
    ("call", "axes", "groups", "size"),
    [
        (lambda x: F.layer_norm(x, (5,)), (3,), None, 5),
        (lambda x: F.layer_norm(x, (4, 5)), (2, 3), None, 20),
        (lambda x: F.group_norm(x, 3), (1, 2, 3), 3, 80),
        (lambda x: F.group_norm(x, 12), (2, 3), None, 20),
        (lambda x: F.batch_norm(x, None, None, training=True), (0, 2, 3), None, 40),
        (lambda x: x / x.norm(dim=1, keepdim=True), (1,), None, 12),
        (torch.tanh, (), None, 1),
    ],
)
def test_axes_and_groups(call: object, axes: tuple[int, ...], groups: int | None, size: int) -> None:
    layout = find_layout(call, X)
    assert layout is not None
    assert (layout.axes, layout.groups, layout.size) == (axes, groups, size)


@pytest.mark.parametrize(("start", "stop"), [(0, 7), (3, 10), (0, 4), (8, 12), (5, 9)])
def test_a_slice(start: int, stop: int) -> None:
    def call(x: torch.Tensor) -> torch.Tensor:
        y = x.clone()
        y[:, start:stop] = x[:, start:stop] / x[:, start:stop].norm(dim=1, keepdim=True)
        return y

    layout = find_layout(call, X)
    assert layout is not None
    assert layout.part == (1, start, stop)
    assert layout.split(X).shape == (2, stop - start, 4, 5)


def test_what_is_no_box_has_no_layout() -> None:
    assert find_layout(lambda x: x.cumsum(1), X) is None
    assert find_layout(lambda x: x.flip(1), X) is None
    assert find_layout(torch.zeros_like, X) is None
    assert find_layout(lambda x: torch.cat([x[:, :1].flip(-1), x[:, 1:]], 1), X) is None
    scattered = torch.tensor([[0, 0], [1, 1]])
    assert layout_of(scattered, (0, 0), (2, 2)) is None
