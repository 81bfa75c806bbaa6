"""Numbers of elements go through moves without tensors of the size of an activation."""

from __future__ import annotations

import pytest
import torch

from normprobe.anatomy.flow.replay import condensed, counted, reshaped


@pytest.mark.parametrize(
    ("shape", "axis", "fresh", "held"),
    [
        ((2, 1 << 20, 4096), 2, (2, 1 << 20, 32, 128), 4096),
        ((2, 1 << 20, 4096), 2, (2 << 20, 4096), 4096),
        ((2, 32, 1 << 20, 128), 1, (64, 1 << 20, 128), 64),
        ((2, 3, 1, 4096), 0, (2, -1), 2),
    ],
)
def test_only_axes_that_are_merged_are_copied(
    shape: tuple[int, ...], axis: int, fresh: tuple[int, ...], held: int
) -> None:
    numbers = reshaped(counted(shape, axis), fresh)
    assert numbers is not None
    assert condensed(numbers).numel() == held


@pytest.mark.parametrize("fresh", [(6, 20), (2, 3, 2, 10), (1, 3, 2, 20), (120,), (30, -1), (2, 1, 60)])
def test_numbers_are_those_of_a_plain_view(fresh: tuple[int, ...]) -> None:
    for axis in range(3):
        numbers = counted((2, 3, 20), axis)
        moved = reshaped(numbers, fresh)
        assert moved is not None
        assert torch.equal(moved, numbers.contiguous().view(fresh))
