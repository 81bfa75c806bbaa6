"""Factors on trunk and branch: behind their sum, or as an interpolation between them."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from normprobe.records import Stream
from tests.anatomy.reading import anatomy_of, only_stream

WIDTH = 8
Merge = Callable[[nn.Module, Tensor, Tensor], Tensor]


class Block(nn.Module):
    def __init__(self, merge: Merge) -> None:
        super().__init__()
        self.norm, self.f = nn.LayerNorm(WIDTH), nn.Sequential(nn.Linear(WIDTH, 12), nn.GELU(), nn.Linear(12, WIDTH))
        self.gate, self.share, self.merge = nn.Linear(WIDTH, WIDTH), nn.Parameter(torch.rand(WIDTH)), merge
        self.size, self.sizes = nn.Parameter(torch.tensor(0.5)), nn.Parameter(torch.tensor([3.0, 4.0, 5.0]))

    def forward(self, x: Tensor) -> Tensor:
        return self.merge(self, x, self.f(self.norm(x)))


def read(merge: Merge, *head: nn.Module) -> Stream:
    torch.manual_seed(0)
    blocks = [Block(merge) for _ in range(3)]
    return only_stream(anatomy_of(nn.Sequential(nn.Linear(WIDTH, WIDTH), *blocks, *head), torch.randn(2, 6, WIDTH)))


@pytest.mark.parametrize(
    ("merge", "skip", "branch"),
    [
        (lambda b, x, y: (x + y) / 2**0.5, 0.5**0.5, 0.5**0.5),
        (lambda b, x, y: 0.8 * (x + 0.5 * y), 0.8, 0.4),
        (lambda b, x, y: torch.lerp(x, y, torch.full((), 0.25)), 0.75, 0.25),
    ],
    ids=["divided", "multiplied", "interpolated"],
)
def test_a_constant_behind_the_sum_scales_trunk_and_branch(merge: Merge, skip: float, branch: float) -> None:
    stream = read(merge, nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 5))
    assert (stream.placement, stream.final_norm, stream.topology) == ("pre", "4", "ordinary")
    assert [b.skip_scale for b in stream.branches] == pytest.approx([skip] * 3)
    assert [b.branch_scale.kind for b in stream.branches] == ["constant"] * 3
    assert [b.branch_scale.value for b in stream.branches] == pytest.approx([branch] * 3)


def test_the_factor_of_the_head_is_none_of_the_last_branch() -> None:
    class Halves(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x / 2

    stream = read(lambda b, x, y: x + y, Halves(), nn.Linear(WIDTH, 5))
    assert [(b.skip_scale, b.branch_scale.kind) for b in stream.branches] == [(1.0, "none")] * 3


def test_learned_and_gated_interpolation() -> None:
    stream = read(lambda b, x, y: torch.lerp(x, y, b.share), nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 5))
    assert (stream.placement, stream.topology) == ("pre", "ordinary")
    assert [(b.skip_scale, b.branch_scale.kind) for b in stream.branches] == [(None, "channel")] * 3
    assert [b.branch_scale.parameter for b in stream.branches] == [f"{i}.share" for i in (1, 2, 3)]
    stream = read(lambda b, x, y: torch.lerp(x, y, torch.sigmoid(b.gate(x))), nn.LayerNorm(WIDTH))
    assert (stream.placement, stream.topology) == ("pre", "gated")
    assert [(b.skip_scale, b.branch_scale.kind) for b in stream.branches] == [(None, "gate")] * 3


def test_a_normed_interpolation_is_post_norm() -> None:
    stream = read(lambda b, x, y: nn.functional.normalize(torch.lerp(x, y, b.share), dim=-1))
    assert stream.placement == "post"


@pytest.mark.parametrize(
    ("merge", "value"),
    [
        (lambda b, x, y: x + torch.tanh(b.size) * y, math.tanh(0.5)),
        (lambda b, x, y: x + b.size.exp() * y, math.exp(0.5)),
        (lambda b, x, y: x + (3 * y) * b.size, 1.5),
        (lambda b, x, y: x + y / b.size * 0.1, 0.2),
        (lambda b, x, y: x + b.size * (b.sizes[1] * y), 2.0),
        (lambda b, x, y: x + b.sizes[2] * y, 5.0),
    ],
    ids=["tanh", "exponential", "times a constant", "divided", "of two", "one of several"],
)
def test_a_learned_scalar_is_told_as_it_acts(merge: Merge, value: float) -> None:
    stream = read(merge, nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 5))
    assert [b.branch_scale.kind for b in stream.branches] == ["scalar"] * 3
    assert [b.branch_scale.value for b in stream.branches] == pytest.approx([value] * 3)


def test_a_learned_scalar_on_the_meta_device_has_no_value() -> None:
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), *(Block(lambda b, x, y: x + b.size.exp() * y) for _ in range(3)))
    stream = only_stream(anatomy_of(model.to("meta"), torch.randn(2, 6, WIDTH)))
    assert [(b.branch_scale.kind, b.branch_scale.value) for b in stream.branches] == [("scalar", None)] * 3


@pytest.mark.parametrize(
    ("merge", "skip", "kind"),
    [
        (lambda b, x, y: x + 0.1 * (y - x), 0.9, "constant"),
        (lambda b, x, y: x + b.share * (y - x), None, "channel"),
        (lambda b, x, y: x + b.share.mean().tanh() * y, 1.0, "scalar"),
    ],
    ids=["a tenth of the way", "a learned part of the way", "one number from many"],
)
def test_what_a_branch_takes_off_the_trunk_scales_the_skip(merge: Merge, skip: float | None, kind: str) -> None:
    stream = read(merge, nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 5))
    assert [b.skip_scale for b in stream.branches] == [skip] * 3
    assert [b.branch_scale.kind for b in stream.branches] == [kind] * 3


class Copies(nn.Module):
    """A block that writes to four copies of the stream, to each its own multiple."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.f = nn.LayerNorm(WIDTH), nn.Sequential(nn.Linear(WIDTH, 12), nn.GELU(), nn.Linear(12, WIDTH))
        self.taken, self.share = nn.Parameter(torch.rand(4)), nn.Parameter(torch.rand(4))
        self.mix = nn.Parameter(torch.eye(4) + 0.1)

    def forward(self, x: Tensor) -> Tensor:
        y = self.f(self.norm(torch.einsum("btnc,n->btc", x, self.taken)))
        return torch.einsum("btnc,nm->btmc", x, self.mix) + self.share[:, None] * y[:, :, None]


def test_a_factor_for_each_copy_of_the_stream_is_none_of_channels() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.enter, self.blocks = nn.Linear(WIDTH, WIDTH), nn.ModuleList(Copies() for _ in range(3))
            self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 5)

        def forward(self, x: Tensor) -> Tensor:
            x = self.enter(x)[:, :, None].expand(-1, -1, 4, -1)
            for block in self.blocks:
                x = block(x)
            return self.head(self.norm(x.sum(2)))

    stream = only_stream(anatomy_of(Net(), torch.randn(2, 6, WIDTH)))
    assert [(b.branch_scale.kind, b.branch_scale.value) for b in stream.branches] == [("scalar", None)] * 3
