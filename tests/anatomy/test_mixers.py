"""Whether an operation inside a branch runs along the tokens or along the features of each decides what it is."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import normprobe
from tests.anatomy.reading import anatomy_of, only_stream
from tests.anatomy.test_kinds import INNER, TOKENS, WIDTH, Block, Inside, read


def mean_over_features(_: nn.Module, h: Tensor) -> Tensor:
    return F.avg_pool1d(F.gelu(h), 3, 1, 1)


def convolution_over_features(block: nn.Module, h: Tensor) -> Tensor:
    kernel = block.mix.weight[:1, None, :3]
    return F.conv1d(F.gelu(h).reshape(-1, 1, INNER), kernel, padding=1).view_as(h)


def frequencies_of_features(block: nn.Module, h: Tensor) -> Tensor:
    return torch.fft.irfft(torch.fft.rfft(h) * block.mix.weight.sum(), n=INNER)  # type: ignore[no-any-return]


def sorted_features(_: nn.Module, h: Tensor) -> Tensor:
    return h.sort(-1).values


def largest_features(_: nn.Module, h: Tensor) -> Tensor:
    return h.unflatten(-1, (INNER // 2, 2)).amax(-1).repeat(1, 1, 2)


def shifted(_: nn.Module, h: Tensor) -> Tensor:
    return F.gelu(h) + F.pad(h, (0, 0, 1, 0))[:, :TOKENS]


def one_by_one(_: nn.Module, h: Tensor) -> Tensor:
    return torch.stack([F.gelu(token) for token in h.unbind(1)], 1)


@pytest.mark.parametrize(
    "inside",
    [
        mean_over_features,
        convolution_over_features,
        frequencies_of_features,
        sorted_features,
        largest_features,
        shifted,
        one_by_one,
    ],
)
def test_along_the_features_it_is_an_mlp(inside: Inside) -> None:
    assert [b.kind for b in only_stream(read(Block(inside))).branches] == ["mlp"] * 2


def decayed(tokens: tuple[Tensor, ...]) -> list[Tensor]:
    state, found = torch.zeros(()), []
    for token in tokens:
        state = 0.9 * state + token
        found.append(state)
    return found


def by_unbind(_: nn.Module, h: Tensor) -> Tensor:
    return torch.stack(decayed(h.unbind(1)), 1)


def by_split(_: nn.Module, h: Tensor) -> Tensor:
    return torch.cat(decayed(h.split(1, 1)), 1)


def by_slice(_: nn.Module, h: Tensor) -> Tensor:
    return torch.cat(decayed(tuple(h[:, i : i + 1] for i in range(TOKENS))), 1)


def by_doubling(_: nn.Module, h: Tensor) -> Tensor:
    gate, step = h.sigmoid(), 1
    while step < TOKENS:
        h = h + gate * F.pad(h, (0, 0, step, 0))[:, :TOKENS]
        gate = gate * F.pad(gate, (0, 0, step, 0))[:, :TOKENS]
        step *= 2
    return h


@pytest.mark.parametrize("inside", [by_unbind, by_split, by_slice, by_doubling])
def test_a_state_carried_along_the_tokens_is_a_recurrence(inside: Inside) -> None:
    assert [b.kind for b in only_stream(read(Block(inside))).branches] == ["recurrent"] * 2


def mean(_: nn.Module, h: Tensor) -> Tensor:
    return F.gelu(h.mean(1, keepdim=True) + h)


def maximum(_: nn.Module, h: Tensor) -> Tensor:
    return h - h.amax(1, keepdim=True)


def fixed_matrix(_: nn.Module, h: Tensor) -> Tensor:
    return torch.ones(TOKENS, TOKENS).tril() @ h


@pytest.mark.parametrize("inside", [mean, maximum, fixed_matrix])
def test_what_brings_tokens_together_otherwise_is_no_mlp(inside: Inside) -> None:
    assert [b.kind for b in only_stream(read(Block(inside))).branches] == ["other"] * 2


def test_a_product_of_unknown_axes_leaves_the_kind_unknown() -> None:
    def stretched(_: nn.Module, h: Tensor) -> Tensor:
        q, k, v = F.interpolate(h.transpose(1, 2), 2 * TOKENS).transpose(1, 2).chunk(3, -1)
        return (q @ (k.transpose(-2, -1) @ v))[:, ::2]

    model = nn.Sequential(Block(stretched, into=8), Block(stretched, into=8))
    report = normprobe.probe(model, torch.randn(2, TOKENS, WIDTH), level="structure")
    assert [b.kind for b in only_stream(report.anatomy).branches] == ["other"] * 2
    (skipped,) = [s for s in report.skipped if s.what.startswith("kind of the branch")]
    assert skipped.what == "kind of the branch with aten.bmm.default at 0 and 1 more"
    assert skipped.why == "it cannot be told whether its factors hold several tokens"


class OnChannels(nn.Module):
    """1x1 convolutions around a softmax over the channels, or depthwise ones around cumulative norms."""

    def __init__(self, cumulative: bool) -> None:
        super().__init__()
        self.cumulative, self.norm = cumulative, nn.GroupNorm(1, WIDTH)
        self.up, self.down = nn.Conv1d(WIDTH, INNER, 1), nn.Conv1d(INNER, WIDTH, 1)
        self.short = nn.Conv1d(INNER, INNER, 3, padding=1, groups=INNER)

    def forward(self, x: Tensor) -> Tensor:
        h = self.up(self.norm(x))
        return x + self.down(normed(self.short(normed(h.relu()))) if self.cumulative else h.softmax(1))


def normed(h: Tensor) -> Tensor:
    """Normed by the mean and variance of all features of the places so far."""
    count = torch.arange(1, h.shape[2] + 1) * h.shape[1]
    mean = h.sum(1, keepdim=True).cumsum(2) / count
    square = h.square().sum(1, keepdim=True).cumsum(2) / count
    return (h - mean) / (square - mean.square() + 1e-5).sqrt()


@pytest.mark.parametrize(("cumulative", "kind"), [(False, "mlp"), (True, "conv")])
def test_statistics_and_weights_of_one_place_mix_no_tokens(cumulative: bool, kind: str) -> None:
    model = nn.Sequential(OnChannels(cumulative), OnChannels(cumulative))
    assert [b.kind for b in only_stream(anatomy_of(model, torch.randn(2, WIDTH, 9))).branches] == [kind] * 2
