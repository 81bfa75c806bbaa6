"""Copies, casts and views inside a norm that is written out change nothing of what it is read as."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.anatomy.reading import anatomy_of

WIDTH = 8
Way: TypeAlias = "Callable[[Block, Tensor], Tensor]"


class Block(nn.Module):
    """A branch behind a norm that `way` writes out."""

    def __init__(self, way: Way) -> None:
        super().__init__()
        self.way = way
        self.a, self.w = nn.Parameter(torch.tensor(0.7)), nn.Parameter(torch.ones(WIDTH))
        self.b, self.read = nn.Parameter(torch.zeros(WIDTH)), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + F.gelu(self.read(self.way(self, x)))


def rms(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5)


BOUNDED: dict[str, Way] = {
    "nothing": lambda m, x: torch.tanh(m.a * x) * m.w + m.b,
    "copy": lambda m, x: torch.tanh((m.a * x).clone()) * m.w + m.b,
    "layout": lambda m, x: torch.tanh((m.a * x.transpose(0, 1)).contiguous().transpose(0, 1)) * m.w + m.b,
    "cast": lambda m, x: torch.tanh((m.a * x).bfloat16()).float() * m.w + m.b,
    "view": lambda m, x: torch.tanh((m.a * x).view(-1, WIDTH)).view(x.shape) * m.w + m.b,
    "view over the gain": lambda m, x: (torch.tanh((m.a * x).view(-1, WIDTH)) * m.w + m.b).view(x.shape),
    "turn": lambda m, x: torch.tanh((m.a * x).transpose(1, 2)).transpose(1, 2) * m.w + m.b,
    "copy behind": lambda m, x: torch.tanh(m.a * x).clone() * m.w + m.b,
    "copy of the gain's product": lambda m, x: (torch.tanh(m.a * x) * m.w).clone() + m.b,
}
NORMED: dict[str, Way] = {
    "nothing": lambda m, x: rms(x) * m.w,
    "copy": lambda m, x: rms(x).clone() * m.w,
    "view": lambda m, x: rms(x).view(-1, WIDTH).mul(m.w).view(x.shape),
    "detached": lambda m, x: rms(x).detach() * m.w,
}


@pytest.mark.parametrize("way", BOUNDED)
def test_a_bounded_stand_in(way: str) -> None:
    anatomy = anatomy_of(nn.Sequential(*(Block(BOUNDED[way]) for _ in range(2))), torch.randn(2, 5, WIDTH))
    assert [(n.kind, n.affine, n.weight, n.bias) for n in anatomy.norms] == [
        ("dyt", "weight+bias", f"{i}.w", f"{i}.b") for i in range(2)
    ]
    assert anatomy.streams[0].placement == "pre"


@pytest.mark.parametrize("way", NORMED)
def test_a_gain_behind_a_norm(way: str) -> None:
    anatomy = anatomy_of(nn.Sequential(*(Block(NORMED[way]) for _ in range(2))), torch.randn(2, 5, WIDTH))
    assert [(n.kind, n.affine, n.weight) for n in anatomy.norms] == [("rmsnorm", "weight", f"{i}.w") for i in range(2)]


def test_elements_that_change_places_are_no_norm() -> None:
    turned = Block(lambda m, x: torch.tanh((m.a * x).flip(-1)) * m.w + m.b)
    assert all(norm.weight is None for norm in anatomy_of(turned, torch.randn(2, 5, WIDTH)).norms)
