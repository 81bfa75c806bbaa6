"""Massive activations: a few entries of the stream that are far larger than all others."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

from torch import Tensor

from normprobe.records import MassiveActivation

RATIO = 100.0  # times the median |x|
SHARE = 1e-3  # of all entries: more than these, and more than MOST, are no longer a few
MOST = 16  # entries that are kept, the largest
_SAMPLE = 4096


class Entry(NamedTuple):
    """One entry: its channel, the flat index of its token, its value, and |value| over the median |x|."""

    channel: int
    token: int
    value: float
    ratio: float


def find(x_BSC: Tensor, abs_max: float) -> tuple[Entry, ...]:
    """The entries of one state of the stream with |x| > `RATIO` · median |x|, largest first.

    Sun et al. 2024 (Massive Activations in Large Language Models, sec. 2) speak of |x| > 100 and about 1,000
    times the median. The first has a unit, so that a model that scales its embedding would have none; it is
    left out. Of the second a tenth is taken here, and the check that reads the ratio has the limit.

    Args:
        x_BSC: the state, finite.
        abs_max: its largest |x|.

    Returns:
        At most `MOST` entries. None where more than `SHARE` of the entries stand out (a sparse stream), or
        where the median is 0.
    """
    if not math.isfinite(abs_max) or abs_max <= 0.5 * RATIO * _typical(x_BSC):
        return ()
    size = x_BSC.abs().flatten()
    median = float(size.median())
    count = int((size > RATIO * median).sum())
    if median == 0 or not 0 < count <= max(MOST, SHARE * size.numel()):
        return ()
    width = x_BSC.shape[-1]
    found = []
    for at in size.topk(min(MOST, count)).indices.tolist():
        token, channel = divmod(at, width)
        value = float(x_BSC[token // x_BSC.shape[1], token % x_BSC.shape[1], channel])
        found.append(Entry(channel, token, value, abs(value) / median))
    return tuple(found)


def _typical(x_BSC: Tensor) -> float:
    """The median |x| of evenly spread tokens: near enough to tell whether the exact one is worth its time."""
    rows = max(1, _SAMPLE // x_BSC.shape[-1])
    return float(x_BSC[:, :: max(1, x_BSC.shape[1] // rows)].abs().median())


def merge(states: Sequence[Sequence[Entry]], position: Callable[[int], int]) -> tuple[MassiveActivation, ...]:
    """Entries of all states joined by channel and position: the largest value, the first and the last state.

    Args:
        states: entries of each state of a stream, in order.
        position: the place along the sequence of a flat token index.
    """
    joined: dict[tuple[int, int], MassiveActivation] = {}
    for index, entries in enumerate(states):
        for entry in entries:
            key = entry.channel, position(entry.token)
            known = joined.get(key)
            larger = known is None or abs(entry.value) > abs(known.value)
            kept = (entry.value, entry.ratio) if larger or known is None else (known.value, known.ratio)
            joined[key] = MassiveActivation(
                channel=key[0],
                position=key[1],
                value=kept[0],
                ratio=kept[1],
                first=index if known is None else known.first,
                last=index,
            )
    ordered = sorted(joined.values(), key=lambda one: -abs(one.value))
    return tuple(ordered[:MOST])
