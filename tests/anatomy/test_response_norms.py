"""Norms whose statistic is a mean over neighbours."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.anatomy.reading import anatomy_of


class Function(nn.Conv2d):
    """Norms what it has convolved."""

    def forward(self, x: Tensor) -> Tensor:
        return F.local_response_norm(super().forward(x), 5, k=2.0)


class Pooling(nn.Module):
    """Mixes neighbours: a mean over a window that slides, without the middle."""

    def forward(self, x: Tensor) -> Tensor:
        return F.avg_pool2d(x, 3, 1, 1) - x


@pytest.mark.parametrize(
    ("part", "paths"),
    [
        (nn.LocalResponseNorm(5), ["1"]),
        (Function(16, 16, 1), ["1#div:0"]),
        (nn.AvgPool2d(3, 1, 1), []),
        (Pooling(), []),
    ],
)
def test_a_mean_of_neighbours_may_be_a_statistic(part: nn.Module, paths: list[str]) -> None:
    model = nn.Sequential(nn.Conv2d(3, 16, 3), part, nn.ReLU(), nn.Conv2d(16, 4, 1))
    found = anatomy_of(model, torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(0)))
    assert [n.path for n in found.norms] == paths
    assert {(n.kind, n.size, n.axes) for n in found.norms} <= {("lrn", 5, (1,))}
