"""Branches that run side by side and are summed, or joined in front of one writer."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from normprobe.records import Stream
from tests.anatomy.reading import anatomy_of, only_stream

WIDTH, TOKENS = 16, 5


class Attend(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)

    def forward(self, h: Tensor) -> Tensor:
        q, k, v = self.qkv(h).unsqueeze(1).chunk(3, -1)
        return F.scaled_dot_product_attention(q, k, v).squeeze(1)


def mlp(into: int = WIDTH) -> nn.Sequential:
    return nn.Sequential(nn.Linear(WIDTH, 4), nn.ReLU(), nn.Linear(4, into))


class Layer(nn.Module):
    """x + f(norm(x)), where `branch` computes f from the layer and norm(x)."""

    def __init__(self, branch: Callable[[Layer, Tensor], Tensor], wide: int, summands: int = 1) -> None:
        super().__init__()
        self.branch, self.norm, self.attend, self.gate = branch, nn.LayerNorm(WIDTH), Attend(), nn.Linear(WIDTH, WIDTH)
        self.mlps, self.out = nn.ModuleList(mlp() for _ in range(summands)), nn.Linear(wide, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.branch(self, self.norm(x))


def read(branch: Callable[[Layer, Tensor], Tensor], wide: int = WIDTH, summands: int = 1) -> Stream:
    layers = [Layer(branch, wide, summands) for _ in range(2)]
    return only_stream(anatomy_of(nn.Sequential(*layers), torch.randn(2, TOKENS, WIDTH)))


def test_joined_along_the_first_axis_they_are_one_branch() -> None:
    def stacked(layer: Layer, h: Tensor) -> Tensor:
        return layer.out(torch.cat([layer.attend(h), layer.mlps[0](h)]))[: len(h)]  # type: ignore[no-any-return]

    assert [b.kind for b in read(stacked).branches] == ["attention"] * 2


def test_what_the_writer_reads_of_the_stream_itself_is_no_branch() -> None:
    def gated(layer: Layer, h: Tensor) -> Tensor:
        features = [layer.attend(h), h * layer.gate(h).sigmoid()]
        return layer.out(torch.cat(features, -1))  # type: ignore[no-any-return]

    assert [b.kind for b in read(gated, 2 * WIDTH).branches] == ["attention"] * 2


def test_an_mlp_joined_with_attention_is_a_branch_beside_it() -> None:
    def joined(layer: Layer, h: Tensor) -> Tensor:
        return layer.out(torch.cat([layer.attend(h), layer.mlps[0](h)], -1))  # type: ignore[no-any-return]

    stream = read(joined, 2 * WIDTH)
    assert [b.kind for b in stream.branches] == ["attention", "mlp"] * 2
    assert [b.readers for b in stream.branches[:2]] == [
        ("0.attend.qkv.bias", "0.attend.qkv.weight"),
        ("0.mlps.0.0.bias", "0.mlps.0.0.weight"),
    ]


def test_summands_of_two_kinds_share_the_factor_on_their_sum() -> None:
    def summed(layer: Layer, h: Tensor) -> Tensor:
        return 0.5 * (layer.attend(h) + layer.mlps[0](h))  # type: ignore[no-any-return]

    stream = read(summed)
    assert [b.kind for b in stream.branches] == ["attention", "mlp"] * 2
    assert [b.branch_scale.value for b in stream.branches] == [0.5] * 4


def test_a_sum_of_many_is_walked_once() -> None:
    def summed(layer: Layer, h: Tensor) -> Tensor:
        return sum((f(h) for f in layer.mlps), torch.zeros(()))

    started = time.process_time()
    assert [b.kind for b in read(summed, summands=400).branches] == ["mlp"] * 2
    assert time.process_time() - started < 10.0
