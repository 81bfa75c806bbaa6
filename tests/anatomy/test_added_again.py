"""A stream whose writes are kept in a list and added up at every read is one stream."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.anatomy.reading import anatomy_of
from tests.checks.placement.planted import codes, found

WIDTH, LAYERS = 8, 4
TOKENS = torch.randn(2, 5, WIDTH)


def listed(writes: list[Tensor]) -> Tensor:
    return sum(writes)  # type: ignore[return-value]


def stacked(writes: list[Tensor]) -> Tensor:
    return torch.stack(writes).sum(0)


class Kept(nn.Module):
    """A stack of MLPs; the layer `raw` reads what it reads without its norm."""

    def __init__(self, total: Callable[[list[Tensor]], Tensor], raw: int = -1) -> None:
        super().__init__()
        self.total, self.raw = total, raw
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(LAYERS + 1))
        self.up = nn.ModuleList(nn.Linear(WIDTH, 2 * WIDTH) for _ in range(LAYERS))
        self.down = nn.ModuleList(nn.Linear(2 * WIDTH, WIDTH) for _ in range(LAYERS))
        self.head = nn.Linear(WIDTH, 4)

    def forward(self, x: Tensor) -> Tensor:
        writes = [x]
        for layer in range(LAYERS):
            h = self.total(writes)
            h = h if layer == self.raw else self.norms[layer](h)
            writes.append(self.down[layer](F.gelu(self.up[layer](h))))
        return self.head(self.norms[-1](self.total(writes)))


@pytest.mark.parametrize("total", [listed, stacked])
def test_it_is_one_stream(total: Callable[[list[Tensor]], Tensor]) -> None:
    (stream,) = anatomy_of(Kept(total), TOKENS).streams
    assert (stream.depth, stream.placement, stream.final_norm) == (LAYERS, "pre", f"norms.{LAYERS}")
    assert codes(Kept(total), TOKENS) == set()


@pytest.mark.parametrize("total", [listed, stacked])
def test_a_layer_without_its_norm_is_found(total: Callable[[list[Tensor]], Tensor]) -> None:
    (finding,) = found("NP206", Kept(total, raw=2), TOKENS)
    assert finding.value == "none"
