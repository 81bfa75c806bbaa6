"""Which computed weights are reparametrised ones, and of which kind."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations

from tests.anatomy.reading import anatomy_of

WIDTH = 8


class Standardised(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        weight = F.batch_norm(self.weight.reshape(1, self.out_features, -1), None, None, training=True)
        return F.linear(x, weight.reshape_as(self.weight), self.bias)


@pytest.mark.parametrize(
    ("make", "kind"),
    [
        (lambda: parametrizations.spectral_norm(nn.Linear(WIDTH, 12)), "spectral_norm"),
        (lambda: parametrizations.weight_norm(nn.Linear(WIDTH, 12)), "weight_norm"),
        (lambda: Standardised(WIDTH, 12), "weight_standardization"),
    ],
)
def test_kind_of_a_linear_layer(make: Callable[[], nn.Module], kind: str) -> None:
    found = anatomy_of(nn.Sequential(make()), torch.randn(2, 3, WIDTH)).reparametrizations
    assert [(r.path, r.kind) for r in found] == [("0", kind)]


class Latents(nn.Module):
    """Attention whose queries come from normed parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.latents, self.norm = nn.Parameter(torch.randn(6, WIDTH)), nn.LayerNorm(WIDTH)
        self.q, self.k = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k = self.q(self.norm(self.latents)).expand(len(x), -1, -1), self.k(x)
        return (q @ k.mT).softmax(-1) @ k


class Joined(nn.Module):
    """A weight put together from two, one of which is empty."""

    def __init__(self) -> None:
        super().__init__()
        self.tied, self.rest = nn.Parameter(torch.randn(WIDTH, 5)), nn.Parameter(torch.randn(0, 5))

    def forward(self, x: Tensor) -> Tensor:
        return x @ torch.cat([self.tied, self.rest])


@pytest.mark.parametrize("make", [Latents, Joined])
def test_other_computed_operands_are_none(make: Callable[[], nn.Module]) -> None:
    assert anatomy_of(make(), torch.randn(2, 6, WIDTH)).reparametrizations == ()
