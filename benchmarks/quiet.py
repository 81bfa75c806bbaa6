"""Two ways of doing something, timed in turns, and which of the turns the rest of the machine left alone."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

QUIET = 0.05  # of the processors' time, taken by others
TRIES = 4  # turns for each that is wanted


class Turn(NamedTuple):
    """Seconds of the plain and of the other way, and the share of the processors that other processes took."""

    plain: float
    other: float
    taken: float = 0.0

    @property
    def ratio(self) -> float:
        """How many times as long the other way takes."""
        return self.other / self.plain


class Ratio(NamedTuple):
    """Median of the ratios with quartiles, median seconds of the plain way, and the largest share that others took."""

    median: float
    low: float
    high: float
    plain: float
    taken: float

    @classmethod
    def of(cls, turns: Sequence[Turn]) -> Ratio:
        """Over all turns given."""
        ratios = sorted(turn.ratio for turn in turns)
        quarter = len(ratios) // 4
        plain = statistics.median(turn.plain for turn in turns)
        taken = max(turn.taken for turn in turns)
        return cls(statistics.median(ratios), ratios[quarter], ratios[-1 - quarter], plain, taken)

    def __str__(self) -> str:
        return f"{self.median:.2f} ({self.low:.2f}–{self.high:.2f})"


def quiet_turns(plain: Callable[[], Any], other: Callable[[], Any], wanted: int) -> list[Turn]:
    """The `wanted` turns with the least done by others, of at most `TRIES` as many; no more once these are quiet."""
    turns: list[Turn] = []
    while len(turns) < TRIES * wanted and sum(turn.taken < QUIET for turn in turns) < wanted:
        turns.append(_turn(plain, other))
    return sorted(turns, key=lambda turn: turn.taken)[:wanted]


def _turn(plain: Callable[[], Any], other: Callable[[], Any]) -> Turn:
    busy, own, started = machine_seconds(), _own(), time.perf_counter()
    times = seconds(plain), seconds(other)
    elapsed = time.perf_counter() - started
    others = (machine_seconds() - busy) - (_own() - own)
    return Turn(*times, max(0.0, others) / (elapsed * (os.cpu_count() or 1)))


def seconds(run: Callable[[], Any]) -> float:
    """Wall time of one run."""
    started = time.perf_counter()
    run()
    return time.perf_counter() - started


def _own() -> float:
    """Processor seconds of this process and its children that ended."""
    return sum(os.times()[:4])


def machine_seconds() -> float:
    """Processor seconds of the whole machine, what a host took included (Linux)."""
    line = Path("/proc/stat").read_text().splitlines()[0]
    user, nice, system, _, _, *interrupts_and_stolen = map(int, line.split()[1:9])  # not idle, not waiting for a disk
    return (user + nice + system + sum(interrupts_and_stolen)) / os.sysconf("SC_CLK_TCK")
