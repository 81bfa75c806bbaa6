"""Which product a weight reads: `WeightSite.source` and the slope of a leaky ReLU."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import normprobe
from normprobe.records import WeightSite

Between = Callable[[Tensor], Tensor]


class Two(nn.Module):
    """Two products with something between them."""

    def __init__(self, between: Between) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)
        self.factor, self.shift, self.between = nn.Parameter(torch.ones(8)), nn.Parameter(torch.zeros(8)), between

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.between(self.first(x)))  # type: ignore[no-any-return]


def second(model: nn.Module, inputs: Tensor) -> WeightSite:
    return normprobe.probe(model, inputs, level="structure").anatomy.weights[1]


@pytest.mark.parametrize(
    "between",
    [
        lambda x: x,
        F.relu,
        lambda x: F.silu(x) + 1.0,
        lambda x: x * torch.sigmoid(x),
        lambda x: 0.5 * x * (1 + torch.erf(x / 2**0.5)),
        lambda x: F.gelu(x.unsqueeze(1)).flatten(1),
        lambda x: F.relu(x).unflatten(1, (2, 4)).mean(1).repeat(1, 2),
        lambda x: F.max_pool1d(F.relu(x)[:, None], 3, 1, 1)[:, 0],
    ],
)
def test_products_in_a_row(between: Between) -> None:
    model, x = Two(between), torch.randn(4, 8)
    first, site = normprobe.probe(model, x, level="structure").anatomy.weights
    assert (first.source, site.source) == (None, "first.weight")


@pytest.mark.parametrize(
    "between",
    [
        lambda x: F.layer_norm(x, (8,)),
        lambda x: 3.0 * F.relu(x),
        lambda x: torch.cat([F.relu(x[:, :4]), F.relu(x[:, :4])], 1) * x,
        lambda x: x.softmax(-1),
        torch.sin,
        lambda x: x * torch.sin(x),
        lambda x: x / x.norm(dim=-1, keepdim=True),
    ],
)
def test_what_ends_a_row(between: Between) -> None:
    assert second(Two(between), torch.randn(4, 8)).source is None


@pytest.mark.parametrize("join", [torch.add, torch.mul, lambda x, y: torch.cat([x[:, :4], y[:, 4:]], 1)])
def test_another_signal_ends_a_row(join: Callable[[Tensor, Tensor], Tensor]) -> None:
    class Skip(Two):
        def forward(self, x: Tensor) -> Tensor:
            return self.second(join(x, F.relu(self.first(x))))  # type: ignore[no-any-return]

    assert second(Skip(F.relu), torch.randn(4, 8)).source is None


def test_the_slope_of_a_leaky_relu() -> None:
    for between, slope in ((lambda x: F.leaky_relu(x, 0.3), 0.3), (F.relu, None), (F.gelu, None)):
        first, _ = normprobe.probe(Two(between), torch.randn(4, 8), level="structure").anatomy.weights
        assert first.slope == (None if slope is None else pytest.approx(slope))
