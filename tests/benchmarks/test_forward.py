"""The benchmark of the measured pass, as far as it needs no model."""

from __future__ import annotations

from benchmarks import forward


def test_the_table_has_a_row_for_each_watcher_and_two_columns_for_each_length() -> None:
    cell = {"ratio": 1.08, "low": 1.05, "high": 1.12, "bare": 0.5, "extra": 12.4}
    text = forward.section({"A": {512: cell, 1536: cell | {"ratio": 1.2}}}, repeats=9)
    assert "| A | 1.08 (1.05–1.12) | 12 | 1.20 (1.05–1.12) | 12 |" in text
    assert "a bare one takes 0.50 s for 512 tokens, 0.50 s for 1536 tokens" in text


def test_the_peak_of_a_run_is_that_run_alone() -> None:
    before = forward.peak(lambda: None)
    during = forward.peak(lambda: bytearray(60_000_000))
    assert 50 < during - before < 80
    assert forward.peak(lambda: None) < before + 20
