"""Outlier channels: features of the stream that are large at most tokens.

Dims: W writes, R sampled tokens, C features.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

from normprobe.records import OutlierChannel

RATIO = 20.0  # times the channel in the middle
MOST = 16  # channels that are kept, the largest ratios
FEWEST = 32  # channels without which the one in the middle says little of the others
_TOKENS = 8  # tokens without which "most tokens" says little


class Outlier(NamedTuple):
    """One channel: the median |x| over the tokens, and that over the median of these medians."""

    channel: int
    size: float
    ratio: float


def find(sampled_WRC: Tensor) -> list[tuple[Outlier, ...]]:
    """The channels of each state whose median |x| over tokens exceeds `RATIO` times that of the channel in the middle.

    Dettmers et al. 2022 (LLM.int8, sec. 4) speak of channels up to 20 times the others, by |x| of 6 and more. The first
    has no unit and is taken here; a median over tokens leaves out what is large at a few tokens (`massive`).

    Returns:
        One tuple a state, the largest ratio first; empty where the middle is 0, where there are fewer than `FEWEST`
        channels or 8 tokens, or where an entry is not finite.
    """
    writes, tokens, width = sampled_WRC.shape
    if tokens < _TOKENS or width < FEWEST:
        return [()] * writes
    sizes_WC = sampled_WRC.abs().median(1).values
    middle_W1 = sizes_WC.median(-1, keepdim=True).values
    ratios_WC = (sizes_WC / middle_W1).where((middle_W1 > 0) & sizes_WC.isfinite().all(-1, keepdim=True), 0.0)
    found: list[list[Outlier]] = [[] for _ in range(writes)]
    places = (ratios_WC > RATIO).nonzero()
    told = zip(
        places.tolist(), sizes_WC[places[:, 0], places[:, 1]], ratios_WC[places[:, 0], places[:, 1]], strict=True
    )
    for (write, channel), size, ratio in told:
        found[write].append(Outlier(channel, float(size), float(ratio)))
    return [tuple(sorted(each, key=lambda one: -one.ratio)[:MOST]) for each in found]


def merge(states: Sequence[Sequence[Outlier]]) -> tuple[OutlierChannel, ...]:
    """The channels of all states joined: size and ratio where the ratio is largest, the first and the last state."""
    joined: dict[int, OutlierChannel] = {}
    for index, channels in enumerate(states):
        for one in channels:
            known = joined.get(one.channel)
            size, ratio = (
                (one.size, one.ratio) if known is None or one.ratio > known.ratio else (known.size, known.ratio)
            )
            first = index if known is None else known.first
            joined[one.channel] = OutlierChannel(channel=one.channel, size=size, ratio=ratio, first=first, last=index)
    return tuple(sorted(joined.values(), key=lambda one: -one.ratio)[:MOST])
