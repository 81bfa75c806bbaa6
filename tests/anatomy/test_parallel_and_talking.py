"""Parallel branches behind one projection, branches that are sums, attention whose heads are mixed, token mixers."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests import models
from tests.anatomy.reading import anatomy_of, only_stream

WIDTH, HEADS = 16, 4


def tokens() -> Tensor:
    return torch.randn(2, 6, WIDTH, generator=torch.Generator().manual_seed(0))


def split(x: Tensor) -> Tensor:
    return x.unflatten(-1, (HEADS, -1)).transpose(1, 2)


class OneProjection(nn.Module):
    """Attention and MLP in parallel; one matrix makes queries, keys, values and the MLP's hidden layer."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.first = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH + 32)
        self.out, self.down = nn.Linear(WIDTH, WIDTH), nn.Linear(32, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v, hidden = self.first(self.norm(x)).split([WIDTH, WIDTH, WIDTH, 32], -1)
        mixed = F.scaled_dot_product_attention(split(q), split(k), split(v)).transpose(1, 2).flatten(2)
        return x + self.out(mixed) + self.down(F.gelu(hidden))


class Merged(OneProjection):
    """The same, with the two outputs merged before the add."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v, hidden = self.first(self.norm(x)).split([WIDTH, WIDTH, WIDTH, 32], -1)
        mixed = F.scaled_dot_product_attention(split(q), split(k), split(v)).transpose(1, 2).flatten(2)
        return x + (self.out(mixed) + self.down(F.gelu(hidden)))


class Joined(OneProjection):
    """The same, with one matrix that writes both to the stream."""

    def __init__(self) -> None:
        super().__init__()
        self.out = self.down = nn.Linear(WIDTH + 32, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v, hidden = self.first(self.norm(x)).split([WIDTH, WIDTH, WIDTH, 32], -1)
        mixed = F.scaled_dot_product_attention(split(q), split(k), split(v)).transpose(1, 2).flatten(2)
        return x + self.out(torch.cat((mixed, F.gelu(hidden)), -1))


@pytest.mark.parametrize("block", [OneProjection, Merged, Joined])
def test_parallel_branches_may_share_the_projection_that_reads_the_stream(block: type[nn.Module]) -> None:
    stream = only_stream(anatomy_of(nn.Sequential(block(), block(), nn.LayerNorm(WIDTH)), tokens()))
    assert [(b.kind, b.placement, b.parallel) for b in stream.branches] == [
        ("attention", "pre", True),
        ("mlp", "pre", True),
    ] * 2
    down = "0.out" if block is Joined else "0.down"
    writers = [{"0.out.weight", "0.out.bias"}, {f"{down}.weight", f"{down}.bias"}]
    assert [set(b.writers) for b in stream.branches[:2]] == writers


class Shared(OneProjection):
    """The same, with one norm on the sum of the two outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.behind = nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v, hidden = self.first(self.norm(x)).split([WIDTH, WIDTH, WIDTH, 32], -1)
        mixed = F.scaled_dot_product_attention(split(q), split(k), split(v)).transpose(1, 2).flatten(2)
        return x + 0.5 * self.behind(self.out(mixed) + self.down(F.gelu(hidden)))


def test_parallel_branches_may_share_the_norm_behind_them() -> None:
    stream = only_stream(anatomy_of(nn.Sequential(Shared(), Shared()), tokens()))
    assert [(b.kind, b.placement, b.parallel, b.branch_scale.value) for b in stream.branches] == [
        ("attention", "sandwich", True, 0.5),
        ("mlp", "sandwich", True, 0.5),
    ] * 2
    assert [(b.pre_norm, b.output_norm) for b in stream.branches[:2]] == [("0.norm", "0.behind")] * 2
    writers = [{"0.out.weight", "0.out.bias"}, {"0.down.weight", "0.down.bias"}]
    assert [set(b.writers) for b in stream.branches[:2]] == writers


class TwoMlps(nn.Module):
    """Two scaled MLPs whose sum is one branch."""

    def __init__(self) -> None:
        super().__init__()
        self.mlps = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 32), nn.GELU(), nn.Linear(32, WIDTH)) for _ in range(2)
        )
        self.scales = nn.Parameter(torch.rand(2, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return x + (self.scales[0] * self.mlps[0](x) + self.scales[1] * self.mlps[1](x))


class StackedMlps(TwoMlps):
    """The same, stacked and summed."""

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.stack([s * mlp(x) for s, mlp in zip(self.scales, self.mlps, strict=True)]).sum(0)


@pytest.mark.parametrize("block", [TwoMlps, StackedMlps])
def test_a_sum_of_scaled_summands_is_scaled(block: type[nn.Module]) -> None:
    stream = only_stream(anatomy_of(nn.Sequential(block(), block()), tokens()))
    assert [(b.kind, b.parallel, b.branch_scale.kind) for b in stream.branches] == [("mlp", False, "channel")] * 2


class TalkingHeads(nn.Module):
    """Attention that mixes its heads before and behind the softmax (Shazeer et al. 2020)."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.before, self.behind = nn.Linear(HEADS, HEADS), nn.Conv2d(HEADS, HEADS, 1)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (split(t) for t in self.qkv(self.norm(x)).chunk(3, -1))
        logits = (q * 0.5) @ k.transpose(-2, -1)
        logits = self.before(logits.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)
        return x + self.out((self.behind(logits.softmax(-1)) @ v).transpose(1, 2).flatten(2))


def test_heads_that_are_mixed_are_heads_of_attention() -> None:
    anatomy = anatomy_of(nn.Sequential(TalkingHeads(), TalkingHeads()), tokens())
    assert [(a.heads, a.scale) for a in anatomy.attention] == [(HEADS, 0.5)] * 2
    assert [b.kind for b in only_stream(anatomy).branches] == ["attention"] * 2


class TokenMixing(nn.Module):
    """MLP-Mixer's block: one MLP over the tokens, one over the features."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2))
        self.tokens = nn.Sequential(nn.Linear(6, 12), nn.GELU(), nn.Linear(12, 6))
        self.features = nn.Sequential(nn.Linear(WIDTH, 32), nn.GELU(), nn.Linear(32, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.tokens(self.norms[0](x).transpose(1, 2)).transpose(1, 2)
        return x + self.features(self.norms[1](x))


def test_the_width_of_a_mixer_is_that_of_its_features() -> None:
    stream = only_stream(anatomy_of(nn.Sequential(TokenMixing(), TokenMixing()), tokens()))
    assert (stream.width, stream.feature_axis) == (WIDTH, -1)


class Scaled(nn.Module):
    """Attention and an MLP of one norm, each with a gain of its own before they are summed."""

    def __init__(self, last: bool) -> None:
        super().__init__()
        self.norm, self.last = nn.LayerNorm(32), last
        self.attention, self.mlp = models.Attention(), models.Mlp()
        self.gains = nn.ParameterList(nn.Parameter(torch.randn(32)) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        writes = self.gains[0] * self.attention(h) + 0.5 * self.mlp(h) * self.gains[1]
        return writes + x if self.last else x + writes


@pytest.mark.parametrize("last", [False, True])
def test_parallel_branches_have_the_scales_of_their_own(last: bool) -> None:
    model = nn.Sequential(*(Scaled(last) for _ in range(3)), nn.LayerNorm(32), nn.Linear(32, 8))
    stream = only_stream(anatomy_of(model, torch.randn(2, 7, 32)))
    found = [(branch.kind, branch.branch_scale.kind, branch.branch_scale.parameter) for branch in stream.branches]
    assert found == [
        each
        for i in range(3)
        for each in (("attention", "channel", f"{i}.gains.0"), ("mlp", "channel", f"{i}.gains.1"))
    ]
