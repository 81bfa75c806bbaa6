"""Which parameter is which tensor of a checkpoint: told by the memory that they share, as the same numbers."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from normprobe.patching.bound import bound


def model(weight: Tensor) -> nn.Module:
    made = nn.Module()
    made.weight = nn.Parameter(weight, requires_grad=False)
    return made


def test_a_parameter_in_the_memory_of_a_tensor_is_that_tensor() -> None:
    stored = {"w": torch.randn(4, 6), "other": torch.randn(4, 6)}
    assert bound(model(stored["w"]), stored) == {"weight": "w"}
    assert bound(model(stored["w"].clone()), stored) == {}


@pytest.mark.parametrize(
    "view",
    [lambda whole: whole[:2], lambda whole: whole.view(6, 4), lambda whole: whole.view(torch.int32)],
    ids=["its first rows", "another shape", "other numbers"],
)
def test_a_part_of_a_tensor_and_its_bytes_as_other_numbers_are_not_it(view: Callable[[Tensor], Tensor]) -> None:
    stored = torch.randn(4, 6)
    assert bound(model(view(stored)), {"w": stored}) == {}
