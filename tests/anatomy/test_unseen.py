"""Which numbers that are added to logits hide keys, row by row."""

from __future__ import annotations

import math

import pytest
import torch

from normprobe.anatomy.attention.unseen import unseen

INF, NAN = math.inf, math.nan


@pytest.mark.parametrize(
    ("row", "hidden"),
    [
        ([0.0, -49.0, -98.0], [False, False, False]),
        ([0.0, -49.0, -100.0], [False, False, True]),
        ([60.0, 0.0, 0.0], [False, True, True]),
        ([-1e4, -1e4, -INF], [True, True, True]),
        ([NAN, -1e4, 0.0], [False, False, False]),
        ([INF, 0.0, 1.0], [False, True, True]),
        ([], []),
    ],
)
def test_a_gap_in_a_row_hides_what_lies_below(row: list[float], hidden: list[bool]) -> None:
    assert unseen(torch.tensor(row)).tolist() == hidden


def test_a_row_of_a_slope_that_other_rows_lead_to_is_seen() -> None:
    slope = -30.0 * torch.arange(9.0)
    assert not unseen(torch.stack((slope, slope - 90))).any()
    assert unseen(torch.stack((slope, slope - 900))).tolist() == [[False] * 9, [True] * 9]
