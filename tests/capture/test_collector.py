"""The thresholds of Python's collector while a graph grows, and afterwards."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

from normprobe.capture.collector import fewer_collections


@pytest.fixture(autouse=True)
def _thresholds() -> Iterator[None]:
    before = gc.get_threshold()
    yield
    gc.set_threshold(*before)


def test_they_are_raised_and_put_back_also_after_an_error() -> None:
    gc.set_threshold(700, 10, 10)
    inside = []

    def work() -> None:
        with fewer_collections():
            inside.append(gc.get_threshold()[0])
            raise ValueError("inside")

    with pytest.raises(ValueError, match="inside"):
        work()
    assert inside[0] > 10_000
    assert gc.get_threshold() == (700, 10, 10)


@pytest.mark.parametrize("first", [0, 10**7])
def test_a_collector_that_is_off_or_rarer_is_left_alone(first: int) -> None:
    gc.set_threshold(first, 10, 10)
    with fewer_collections():
        assert gc.get_threshold()[0] == first
