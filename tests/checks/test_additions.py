"""Adapters and other additions to a layer that start at zero: sound to NP213 and NP305, as lost weights are not."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import normprobe
from normprobe import Report

WIDTH, BLOCKS = 16, 3


class Adapter(nn.Module):
    """x + up(gelu(down(x))), whose last weights are 0 where `zero`."""

    def __init__(self, inside: int = 4, zero: bool = True, normed: bool = False) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH) if normed else nn.Identity()
        self.down, self.up = nn.Linear(WIDTH, inside), nn.Linear(inside, WIDTH)
        if zero:
            nn.init.zeros_(self.up.weight)
            nn.init.zeros_(self.up.bias)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.write(x)

    def write(self, x: Tensor) -> Tensor:
        return self.up(F.gelu(self.down(self.norm(x))))  # type: ignore[no-any-return]


class Block(nn.Module):
    """A pre-norm block with an adapter behind it, or beside its MLP."""

    def __init__(self, adapter: Adapter, beside: bool) -> None:
        super().__init__()
        self.first, self.second, self.adapter, self.beside = *(nn.LayerNorm(WIDTH) for _ in range(2)), adapter, beside
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.first(x)).unflatten(-1, (3, 2, -1)).permute(2, 0, 3, 1, 4)
        x = x + self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        y = self.down(F.gelu(self.up(self.second(x))))
        return x + (y + self.adapter.write(x)) if self.beside else self.adapter(x + y)  # type: ignore[no-any-return]


def report(*adapters: Adapter, beside: bool = False, lost: bool = False) -> Report:
    torch.manual_seed(0)
    blocks = [Block(adapter, beside) for adapter in adapters]
    if lost:
        nn.init.zeros_(blocks[-1].down.weight)
        nn.init.zeros_(blocks[-1].down.bias)
    model = nn.Sequential(nn.Embedding(32, WIDTH), *blocks, nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 32)).eval()
    return normprobe.probe(model, torch.randint(0, 32, (2, 7)), level="forward")


def said(given: Report, code: str) -> tuple[list[str], list[str]]:
    """Where a check found something, and why it did not look."""
    skips = [one.why for one in given.skipped if one.what.startswith(code)]
    return [f.where for f in given.findings if f.code == code], skips


@pytest.mark.parametrize("beside", [False, True])
@pytest.mark.parametrize("inside", [4, 32])
def test_additions_that_start_at_zero_are_skipped(inside: int, beside: bool) -> None:
    given = report(*(Adapter(inside) for _ in range(BLOCKS)), beside=beside)
    found, (why,) = said(given, "NP213")
    assert (found, "additions to a layer start so" in why) == ([], True)
    found, skips = said(given, "NP305")
    assert (found, len(skips)) == ([], 0 if beside else 1)


def test_a_normed_adapter_that_starts_at_zero() -> None:
    found, (why,) = said(report(*(Adapter(normed=True) for _ in range(BLOCKS))), "NP305")
    assert (found, "weights of zeros write it and all like it" in why) == ([], True)


def test_one_adapter_of_several_that_adds_nothing_is_dead() -> None:
    found, _ = said(report(Adapter(zero=False), Adapter(), Adapter(zero=False)), "NP305")
    assert found == ["2.adapter"]


def test_a_layer_whose_weights_were_lost_is_dead_beside_adapters() -> None:
    given = report(*(Adapter() for _ in range(BLOCKS)), lost=True)
    assert said(given, "NP305")[0] == [str(BLOCKS)]
    assert len(said(given, "NP305")[1]) == 1


def test_an_adapter_reads_the_stream_raw_and_a_layer_does_not() -> None:
    assert said(report(*(Adapter(8, zero=False) for _ in range(BLOCKS))), "NP213") == ([], [])
    assert said(report(*(Adapter(9, zero=False) for _ in range(BLOCKS))), "NP213") == (["1"], [])
