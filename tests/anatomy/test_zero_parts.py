"""Rows of a packed weight that are 0 count as a weight of their own among those that keep gradients from each other."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import normprobe

WIDTH, HEADS = 8, 2
ROWS = {"q": slice(0, WIDTH), "k": slice(WIDTH, 2 * WIDTH), "v": slice(2 * WIDTH, None)}


class Packed(nn.Module):
    """Attention whose one product makes q, k and v; `turned` stores its weight as [in, out]."""

    def __init__(self, turned: bool, written: bool) -> None:
        super().__init__()
        self.turned, self.written = turned, written
        self.norm = nn.LayerNorm(WIDTH)
        self.weight = nn.Parameter(torch.randn(WIDTH, 3 * WIDTH) if turned else torch.randn(3 * WIDTH, WIDTH))
        self.bias, self.out = nn.Parameter(torch.zeros(3 * WIDTH)), nn.Linear(WIDTH, WIDTH)

    def rows(self, part: str) -> Tensor:
        held = self.weight.detach()
        return held[:, ROWS[part]] if self.turned else held[ROWS[part]]

    def forward(self, x: Tensor) -> Tensor:
        batch, tokens, _ = x.shape
        h = self.norm(x)
        if self.turned:
            made = torch.addmm(self.bias, h.view(-1, WIDTH), self.weight).view(batch, tokens, -1)
        else:
            made = F.linear(h, self.weight, self.bias)
        parts = made.split(WIDTH, -1)
        q, k, v = (part.view(batch, tokens, HEADS, -1).transpose(1, 2) for part in parts)
        if self.written:
            mixed = torch.softmax(q @ k.transpose(-1, -2) / 2, -1) @ v
        else:
            mixed = F.scaled_dot_product_attention(q, k, v)
        return x + self.out(mixed.transpose(1, 2).reshape(batch, tokens, WIDTH))


def stays(model: nn.Module) -> set[str]:
    """The names that NP606 gives."""
    report = normprobe.probe(model, torch.randn(2, 6, WIDTH))
    init = report.measurements.init
    return set() if init is None else {name for blocked in init.blocked for name in blocked.zeros}


@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("written", [False, True])
def test_rows_that_stay_zero(turned: bool, written: bool) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*(Packed(turned, written) for _ in range(3)), nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4))
    block = model[1]
    block.rows("v").zero_()
    assert stays(model) == set()  # the output projection hands them a gradient
    nn.init.zeros_(block.out.weight)
    part = f"1.weight[{':, ' if turned else ''}{2 * WIDTH}:{3 * WIDTH}]"
    assert stays(model) == {part, "1.out.weight"}
    with torch.no_grad():
        block.bias[-1] = 1.0
    assert stays(model) == set()


def test_queries_and_keys() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*(Packed(False, False) for _ in range(3)), nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4))
    model[0].rows("q").zero_()
    assert stays(model) == set()
    model[0].rows("k").zero_()
    assert stays(model) == {f"0.weight[0:{WIDTH}]", f"0.weight[{WIDTH}:{2 * WIDTH}]"}
