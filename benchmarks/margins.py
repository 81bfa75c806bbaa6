"""How far a model is from each limit of each check: where the limit would have to lie for the check to speak."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from normprobe.checks import ALL
from normprobe.checks.base import Check
from normprobe.records import Finding, ReportData

LEAST, MOST = 1e-12, 1e12  # limits between which the turn is looked for
EXACT = 0.005  # relative


class Turn(NamedTuple):
    """One limit of one check on one model.

    Attributes:
        code, limit: which.
        at: the value of the limit at which the check begins or ends to speak; all else that it asks for holds.
        rising: whether it speaks while the limit is below `at`, so that a model is sound by `at` below its limit.
    """

    code: str
    limit: str
    at: float
    rising: bool

    @property
    def key(self) -> str:
        """Code and limit as one word."""
        return f"{self.code}.{self.limit}"


def turns(data: ReportData, checks: Iterable[Check] = ALL) -> Iterator[Turn]:
    """Every limit of `checks` that decides of `data` by itself: those at which one value gives a finding and another
    none, the other limits as they are."""
    for check in checks:
        for limit in check.limits():
            found = _turn(check, limit.name, data) if limit.value > 0 else None
            if found is not None:
                yield found


def _turn(check: Check, name: str, data: ReportData) -> Turn | None:
    low, high = LEAST, MOST
    below, above = (_speaks(check, name, end, data) for end in (low, high))
    if below == above:
        return None
    lowest, highest = low, high
    while high / low > 1 + EXACT:
        middle = math.sqrt(low * high)
        if _speaks(check, name, middle, data) == below:
            low = middle
        else:
            high = middle
    if lowest in (low, high) or highest in (low, high):
        return None  # it turns at the end of all, not by what was measured
    return Turn(check.code, name, math.sqrt(low * high), rising=below)


def _speaks(check: Check, name: str, value: float, data: ReportData) -> bool:
    """Whether the check has a finding that stands on this limit."""
    outcomes = dataclasses.replace(check, **{name: value}).run(data)
    return any(isinstance(one, Finding) and one.limit == value for one in outcomes)
