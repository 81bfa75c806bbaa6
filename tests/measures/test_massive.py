from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from normprobe.measures.massive import MOST, find, merge


def state(*planted: tuple[int, int, float], shape: tuple[int, int, int] = (2, 40, 64)) -> Tensor:
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    for token, channel, value in planted:
        x[token // shape[1], token % shape[1], channel] = value
    return x


def found(x: Tensor) -> tuple:
    peaks = x.abs().amax(-1).flatten()
    return find(x, peaks, float(peaks.max()), x.norm(dim=-1).flatten(), x.flatten(0, 1))


def test_a_normal_state_has_none() -> None:
    assert found(state()) == ()
    assert found(1e4 * state()) == ()


def test_planted_entries_are_found_with_their_place_and_ratio_largest_first() -> None:
    x = state((0, 7, 300.0), (41, 9, -2000.0))
    first, second = found(x)
    median = float(x.abs().flatten().median())
    assert (first.channel, first.token, first.value) == (9, 41, -2000.0)
    assert (second.channel, second.token, second.value) == (7, 0, 300.0)
    assert first.ratio == pytest.approx(2000 / median, rel=0.05)
    for entry in (first, second):
        token = x.double().flatten(0, 1)[entry.token]
        assert entry.share == pytest.approx(float(token[entry.channel] ** 2 / token.square().sum()), rel=1e-6)


def test_the_ratio_has_no_unit() -> None:
    x = state((3, 5, 2000.0))
    small, plain = found(x / 1024), found(x)
    assert [(e.channel, e.token, e.ratio) for e in small] == [(e.channel, e.token, e.ratio) for e in plain]


def test_what_is_less_than_a_hundred_times_the_median_does_not_count() -> None:
    x = state((3, 5, 1.0))
    median = float(x.abs().flatten().median())
    assert found(state((3, 5, 99 * median))) == ()
    assert len(found(state((3, 5, 101 * median)))) == 1


def test_a_channels_first_state_is_read_in_its_order() -> None:
    x = state((41, 9, -2000.0))
    mapped = x.mT.contiguous().mT
    assert [entry[:4] for entry in found(mapped)] == [entry[:4] for entry in found(x)]


def test_many_large_entries_are_not_a_few() -> None:
    x = state()
    x[:, :, :8] *= 1e4
    assert found(x) == ()


def test_a_mostly_zero_state_has_no_ratio() -> None:
    x = torch.zeros(1, 10, 8)
    x[0, 3, 2] = 5
    assert found(x) == ()


def test_a_state_that_is_not_finite_has_none() -> None:
    assert found(state((0, 0, math.inf))) == ()
    assert found(state((0, 0, math.nan))) == ()


def test_states_merge_by_channel_and_position() -> None:
    a, b, c = (found(state((0, 7, v), (41, 9, 500.0 if v < 900 else 0.0))) for v in (300.0, 900.0, 600.0))
    merged = merge([(), a, b, c], lambda token: token % 40)
    assert [(m.channel, m.position, m.value, m.first, m.last) for m in merged] == [
        (7, 0, 900.0, 1, 3),
        (9, 1, 500.0, 1, 3),
    ]
    assert (merged[0].ratio, merged[0].share) == (b[0].ratio, b[0].share)


def test_no_more_than_the_largest_are_kept() -> None:
    x = state(*((t, 3, 1000.0 + t) for t in range(20)), shape=(2, 40, 640))
    entries = found(x)
    assert len(entries) == MOST
    assert entries[0].value == 1019.0


@pytest.mark.parametrize("width", [4096, 6144])
def test_no_single_token_and_no_few_channels_decide_the_median_of_a_wide_state(width: int) -> None:
    x = state((5, 9, 300.0), shape=(1, 40, width))
    some = [0, *range(9, 40)]
    x[0, 0] *= 10  # a first token as large as no other
    x[0, 1:, ::32] *= 10  # and every so many channels
    peaks = x.abs().amax(-1).flatten()
    (entry,) = find(x, peaks, float(peaks.max()), x.norm(dim=-1).flatten(), x[0, some])
    assert (entry.token, entry.channel) == (5, 9)
    assert entry.ratio == pytest.approx(300 / float(x[0, some].abs().median()), rel=0.06)
