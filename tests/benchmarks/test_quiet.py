"""Turns of two ways, and the quietest of them."""

from __future__ import annotations

from itertools import count

import pytest

from benchmarks import quiet
from benchmarks.quiet import Ratio, Turn


def test_ratio_is_the_median_over_the_turns() -> None:
    found = Ratio.of([Turn(1.0, 1.1), Turn(2.0, 2.0, 0.3), Turn(1.0, 9.0)])
    assert (found.median, found.plain, found.taken) == (1.1, 1.0, 0.3)
    assert str(found) == "1.10 (1.00–9.00)"


def test_turns_go_on_until_enough_are_quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    told = iter([Turn(1.0, 1.0, taken) for taken in (0.9, 0.0, 0.5, 0.01, 0.0)])
    monkeypatch.setattr(quiet, "_turn", lambda plain, other: next(told))
    assert [turn.taken for turn in quiet.quiet_turns(int, int, wanted=2)] == [0.0, 0.01]
    assert next(told).taken == 0.0


def test_the_quietest_are_taken_where_none_is_quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    numbers = count(1)
    monkeypatch.setattr(quiet, "_turn", lambda plain, other: Turn(1.0, 1.0, 1 / next(numbers)))
    found = quiet.quiet_turns(int, int, wanted=2)
    assert [turn.taken for turn in found] == [1 / 8, 1 / 7]


def test_own_work_is_not_that_of_others() -> None:
    turn = quiet._turn(lambda: sum(range(10**6)), lambda: sum(range(2 * 10**6)))
    assert min(turn.plain, turn.other) > 0
    assert 0 <= turn.taken <= 1
