"""The benchmark of the measured pass, as far as it needs no model."""

from __future__ import annotations

import pytest
import torch

from benchmarks import forward
from benchmarks.forward import NORMPROBE, Cell
from benchmarks.quiet import Ratio


def cell(ratio: float = 1.08, extra: float = 12.4) -> Cell:
    return Cell(Ratio(ratio, 1.05, 1.12, plain=0.5, taken=0.03), extra)


def test_the_table_has_a_row_for_each_watcher_and_two_columns_for_each_length() -> None:
    text = forward.section({"A": {512: cell(), 1536: cell(1.2)}}, {"A": ["rms", "entropy"]}, repeats=9)
    assert "| A | 1.08 (1.05–1.12) | 12 | 1.20 (1.05–1.12) | 12 | `rms`, `entropy` |" in text
    assert "a bare one takes 0.50 s for 512 tokens, 0.50 s for 1536 tokens; other processes took at most 3%" in text
    assert "missed" not in text


@pytest.mark.parametrize(
    ("cells", "missed"),
    [
        ({512: cell(1.10, 30.0)}, []),
        ({512: cell(1.11)}, ["512 tokens: 1.110 times the bare forward"]),
        ({1536: cell(extra=61.0)}, ["1536 tokens: 61 MB more than the bare forward"]),
        ({512: cell(float("nan"))}, ["512 tokens: nan times the bare forward"]),
    ],
)
def test_limits_are_those_of_residual_streams_and_attention(cells: dict[int, Cell], missed: list[str]) -> None:
    assert forward.misses({NORMPROBE: cells, "another": {512: cell(9.0)}}) == missed


def test_numbers_of_a_peer_are_compared_with_the_first_layers() -> None:
    ours = {"rms": torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64)}
    assert not forward.differences(ours, {"rms": ours["rms"][:2] * (1 + 1e-6)}, tolerance=1e-5)


@pytest.mark.parametrize("values", [[1.001, 2.0], [float("nan"), 2.0], []])
def test_a_number_that_differs_from_a_peers_is_told(values: list[float]) -> None:
    ours = {"rms": torch.tensor([1.0, 2.0], dtype=torch.float64)}
    (told,) = forward.differences(ours, {"rms": torch.tensor(values, dtype=torch.float64)}, tolerance=1e-5)
    assert told.startswith("rms: [")


def test_the_peak_of_a_run_holds_what_it_held() -> None:
    before = forward.peak(lambda: None)
    assert forward.peak(lambda: bytearray(200_000_000)) - before > 150
