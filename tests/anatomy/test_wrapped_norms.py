"""Norms inside modules that add something to them."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from tests.anatomy.reading import anatomy_of
from tests.models import WIDTH, decoder


class Gained(nn.Module):
    """A norm without gain, multiplied by a gain of this module."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.gain = nn.LayerNorm(WIDTH, elementwise_affine=False), nn.Parameter(torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x) * (1 + self.gain)


class Dropped(nn.Module):
    """A norm and nothing else of effect."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.drop = nn.LayerNorm(WIDTH), nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        return self.drop(self.inner(x))


def test_a_module_that_adds_the_gain_is_the_norm() -> None:
    found = anatomy_of(*decoder("pre", norm=Gained))
    assert {n.path.rpartition(".")[2] for n in found.norms} == {"norm", "final"}
    assert {(n.affine, n.weight == f"{n.path}.gain") for n in found.norms} == {("one_plus_weight", True)}
    assert found.streams[0].final_norm == "final"


def test_a_module_that_adds_nothing_is_not_listed() -> None:
    found = anatomy_of(*decoder("pre", norm=Dropped))
    assert {n.path.rpartition(".")[2] for n in found.norms} == {"inner"}
    assert found.streams[0].final_norm == "final.inner"
