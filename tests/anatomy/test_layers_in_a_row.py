"""The norm between two layers that make one branch stands before the second; others inside a branch stay inner."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from tests.anatomy.reading import anatomy_of
from tests.models import WIDTH, Attention, Mlp


class Row(nn.Module):
    """x + last(norm(first(entry(x))))."""

    def __init__(self, first: nn.Module, last: nn.Module, bypass: bool = False) -> None:
        super().__init__()
        self.entry, self.norm = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.first, self.last, self.bypass = first, last, bypass

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(self.entry(x))
        h = self.last(self.norm(h) + h if self.bypass else self.norm(h))
        return x + h  # type: ignore[no-any-return]


def role(block: nn.Module) -> str:
    anatomy = anatomy_of(nn.Sequential(block, block, nn.LayerNorm(WIDTH)), torch.randn(2, 5, WIDTH))
    return {n.path: n.role for n in anatomy.norms}["0.norm"]


def linear() -> nn.Module:
    return nn.Linear(WIDTH, WIDTH)


@pytest.mark.parametrize("block", [Row(Attention(), Mlp()), Row(Mlp(), Attention())])
def test_a_norm_between_two_layers_stands_before_the_second(block: nn.Module) -> None:
    assert role(block) == "pre"


@pytest.mark.parametrize(
    "block",
    [
        Row(Attention(), linear()),
        Row(linear(), Mlp()),
        Row(nn.Sequential(Mlp(), nn.GELU()), Mlp()),
        Row(Mlp(), nn.Sequential(nn.GELU(), linear())),
        Row(Attention(), Mlp(), bypass=True),
        Row(Mlp(), Mlp()),
    ],
)
def test_other_norms_inside_a_branch_are_inner(block: nn.Module) -> None:
    assert role(block) == "inner"
