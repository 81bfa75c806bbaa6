"""The benchmark of the measured pass, as far as it needs no model."""

from __future__ import annotations

from benchmarks import forward


def test_the_table_has_a_row_for_each_watcher_and_two_columns_for_each_length() -> None:
    cell = {"ratio": 1.08, "low": 1.05, "high": 1.12, "bare": 0.5, "extra": 12.4}
    text = forward.section({"A": {512: cell, 1536: cell | {"ratio": 1.2}}}, repeats=9)
    assert "| A | 1.08 (1.05–1.12) | 12 | 1.20 (1.05–1.12) | 12 |" in text
    assert "a bare one takes 0.50 s for 512 tokens, 0.50 s for 1536 tokens" in text


def test_the_peak_of_a_run_holds_what_it_held() -> None:
    before = forward.peak(lambda: None)
    assert forward.peak(lambda: bytearray(200_000_000)) - before > 150
