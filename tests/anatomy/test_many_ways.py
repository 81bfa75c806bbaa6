"""A search that takes every way once ends, however many ways there are."""

from __future__ import annotations

import torch
from torch import Tensor, nn

import normprobe


class Gated(nn.Module):
    """Residual branches of one pointwise convolution behind a gate: the ways forward double with every block."""

    def __init__(self, blocks: int) -> None:
        super().__init__()
        self.gate = nn.Conv2d(4, 4, 1)
        self.blocks = nn.ModuleList(nn.Conv2d(4, 4, 1) for _ in range(blocks))

    def forward(self, x: Tensor) -> Tensor:
        x = x * torch.sigmoid(self.gate(x))
        for block in self.blocks:
            x = x + block(x)
        return x


def test_a_gate_before_many_residual_convolutions() -> None:
    report = normprobe.probe(Gated(60), torch.randn(1, 4, 3, 3), level="structure")
    assert report.anatomy.streams[0].depth == 60
    assert report.anatomy.attention == ()
