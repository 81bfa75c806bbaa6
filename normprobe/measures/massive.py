"""Massive activations: a few entries of the stream that are far larger than all others."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from normprobe.measures.tokens import rows_at
from normprobe.records import MassiveActivation

RATIO = 100.0  # times the median |x|
SHARE = 1e-3  # of all entries: more than these, and more than MOST, are no longer a few
MOST = 16  # entries that are kept, the largest
_SAMPLE = 2**12  # entries behind the median |x|, or a few more: of independent normal ones it errs by 2 % (σ)


class Entry(NamedTuple):
    """One entry: its channel, the flat index of its token, its value, |value| over the median |x|, and its share of the
    squared norm of its token."""

    channel: int
    token: int
    value: float
    ratio: float
    share: float


def find(x_BSC: Tensor, peaks_N: Tensor, largest: float, norms_N: Tensor, sample_RC: Tensor) -> tuple[Entry, ...]:
    """The entries of one state of the stream with |x| > `RATIO` · median |x|, largest first.

    Sun et al. 2024 (Massive Activations in Large Language Models, sec. 2) speak of |x| > 100 and about 1,000
    times the median. The first has a unit, so that a model that scales its embedding would have none; it is
    left out. Of the second a tenth is taken here, and the check that reads the ratio has the limit.

    Args:
        x_BSC: the state.
        peaks_N: the largest |x| of every token, 0 for tokens that do not count; `largest` of them all.
        norms_N: the L2 norm of every token.
        sample_RC: some of its tokens, whose median |x| stands for that of all.

    Returns:
        At most `MOST` entries. None where more than `SHARE` of the entries stand out (a sparse stream), or
        where the median is 0 or an entry is not finite.
    """
    if not math.isfinite(largest):
        return ()
    median = _median(sample_RC)
    if median == 0 or largest <= RATIO * median:
        return ()
    limit, most = RATIO * median, max(MOST, SHARE * x_BSC.numel())
    tokens = (peaks_N > limit).nonzero().flatten()
    if len(tokens) > most:
        return ()
    entries_TC = rows_at(x_BSC, tokens).float()
    places = (entries_TC.abs() > limit).nonzero()
    if len(places) > most:
        return ()
    of_token, channels = places.unbind(-1)
    told = torch.stack((entries_TC[of_token, channels].double(), norms_N[tokens][of_token].double()))
    rows = zip(channels.tolist(), tokens[of_token].tolist(), *told.tolist(), strict=True)
    found = (Entry(channel, token, x, abs(x) / median, (x / norm) ** 2) for channel, token, x, norm in rows)
    return tuple(sorted(found, key=lambda entry: -abs(entry.value))[:MOST])


def _median(sample_RC: Tensor) -> float:
    """The median |x| of every so many entries, of all tokens; an odd number of them, as widths are even ones: the same
    few channels of every token would speak for all."""
    every = max(1, (sample_RC.numel() // _SAMPLE - 1) | 1)
    return float(sample_RC.flatten()[::every].abs().median())


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
            kept = entry if larger or known is None else known
            joined[key] = MassiveActivation(
                channel=key[0],
                position=key[1],
                value=kept.value,
                ratio=kept.ratio,
                share=kept.share,
                first=index if known is None else known.first,
                last=index,
            )
    ordered = sorted(joined.values(), key=lambda one: -abs(one.value))
    return tuple(ordered[:MOST])
