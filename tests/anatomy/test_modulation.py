"""Norms whose scale and shift are computed from a condition stand where any norm would stand."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.anatomy.reading import anatomy_of, only_stream

WIDTH = 16


class Modulated(nn.Module):
    """`x + f(norm(x) · (1 + scale) + shift)`, with an activation behind the modulation or without."""

    def __init__(self, activated: bool) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH, elementwise_affine=False)
        self.condition, self.write = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.activated = activated

    def forward(self, x: Tensor, condition: Tensor) -> Tensor:
        scale, shift = self.condition(F.silu(condition))[:, None].chunk(2, -1)
        y = self.norm(x) * (1 + scale) + shift
        return x + self.write(F.silu(y) if self.activated else y)


class Net(nn.Module):
    def __init__(self, activated: bool) -> None:
        super().__init__()
        self.embed, self.blocks = nn.Linear(WIDTH, WIDTH), nn.ModuleList(Modulated(activated) for _ in range(3))
        self.final, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 5)

    def forward(self, x: Tensor, condition: Tensor) -> Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = block(x, condition)
        return self.head(self.final(x))


@pytest.mark.parametrize(("activated", "placement"), [(False, "pre"), (True, "preact")])
def test_a_condition_is_no_activation(activated: bool, placement: str) -> None:
    found = anatomy_of(Net(activated), (torch.randn(2, 7, WIDTH), torch.randn(2, WIDTH)))
    assert {b.placement for b in only_stream(found).branches} == {placement}
    assert {n.role for n in found.norms if n.path != "final"} == {"pre"}
