from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import normprobe
from normprobe.measures.outliers import FEWEST, MOST, Outlier, find, merge


def rows(*planted: tuple[int, float], tokens: int = 32, width: int = 64) -> Tensor:
    """Normal rows in which these channels hold this value, with either sign, at every token."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(tokens, width, generator=generator)
    for channel, value in planted:
        x[:, channel] = value * (1 - 2 * torch.randint(0, 2, (tokens,), generator=generator))
    return x


def test_a_normal_state_has_none() -> None:
    assert find(rows()[None]) == [()]


def test_channels_that_are_large_at_every_token_are_found_with_size_and_ratio() -> None:
    x = rows((7, 40.0), (9, 300.0))
    plain, (first, second) = find(torch.stack([rows(), x]))
    assert plain == ()
    assert [(one.channel, one.size) for one in (first, second)] == [(9, 300.0), (7, 40.0)]
    middle = float(x.double().abs().quantile(0.5, 0, interpolation="lower").quantile(0.5, interpolation="lower"))
    assert [one.ratio for one in (first, second)] == pytest.approx([300 / middle, 40 / middle])


def test_what_is_large_at_fewer_than_half_of_the_tokens_is_no_channel() -> None:
    x = rows()
    x[:15, 5] = 1e4
    assert find(x[None]) == [()]
    x[:17, 5] = 1e4
    assert [one.channel for one in find(x[None])[0]] == [5]


@pytest.mark.parametrize("x", [rows((7, 400.0), tokens=7), rows((7, 400.0), width=FEWEST - 1), torch.zeros(32, 64)])
def test_too_little_tells_nothing(x: Tensor) -> None:
    assert find(x[None]) == [()]


def test_an_entry_that_is_not_finite_tells_nothing() -> None:
    for bad in (float("nan"), float("inf")):
        x = rows((7, 400.0))
        x[:, 3] = bad
        assert find(x[None]) == [()]


def test_no_more_than_a_few_are_kept() -> None:
    found = find(rows(*((channel, 100.0 + channel) for channel in range(20)))[None])[0]
    assert [one.channel for one in found] == list(range(19, 19 - MOST, -1))


def test_states_are_joined_by_channel() -> None:
    one, other = merge([(Outlier(3, 8.0, 30.0),), (), (Outlier(3, 9.0, 50.0), Outlier(4, 2.0, 21.0))])
    assert (one.channel, one.size, one.ratio, one.first, one.last) == (3, 9.0, 50.0, 0, 2)
    assert (other.channel, other.first, other.last) == (4, 2, 2)


class Blocks(nn.Module):
    """Two blocks; the first adds 50 to channel 9 at every token."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.norm, self.head = nn.Embedding(32, 64), nn.LayerNorm(64), nn.Linear(64, 32)
        self.blocks = nn.ModuleList(nn.Sequential(nn.LayerNorm(64), nn.Linear(64, 64)) for _ in range(2))
        with torch.no_grad():
            self.blocks[0][1].bias[9] = 50.0  # type: ignore[index,union-attr]

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        for block in self.blocks:
            x = x + block(x)
        return self.head(self.norm(x))  # type: ignore[no-any-return]


def test_a_probe_names_the_channel_that_no_entry_tells_of() -> None:
    """One channel of every token is more than a few entries."""
    torch.manual_seed(0)
    report = normprobe.probe(Blocks(), torch.arange(32).view(2, 16))
    (stream,) = report.residual
    assert stream.massive == ()
    (channel,) = stream.outliers
    assert (channel.channel, channel.first, channel.last) == (9, 0, 1)
    assert channel.size == pytest.approx(50, abs=3)
    (found,) = [f for f in report.findings if f.code == "NP303"]
    assert found.message.startswith("channel 9 holds")
