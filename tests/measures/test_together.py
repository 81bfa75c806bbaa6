from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import nn

from normprobe.measures import attention, residual
from normprobe.measures.forward import measure_forward
from normprobe.measures.together import Together
from tests.measures.models import anatomy_of, llama


def roots(items: Sequence[float]) -> list[float]:
    if min(items) < 0:
        raise ValueError(f"no root of {min(items)}")
    return [each**0.5 for each in items]


def test_items_that_are_alike_are_told_together_and_each_is_given_its_own() -> None:
    groups: list[list[int]] = []

    def squares(items: Sequence[int]) -> list[int]:
        groups.append(list(items))
        return [each**2 for each in items]

    found: dict[int, int] = {}
    together: Together[int, int] = Together(squares, lambda each: each % 2)
    for each in range(5):
        together.add(each, lambda told, each=each: found.update({each: told}), lambda why: None)  # type: ignore[misc]
    assert found == {}
    together.finish()
    assert found == {each: each**2 for each in range(5)}
    assert groups == [[0, 2, 4], [1, 3]]


def test_an_error_is_the_reason_of_every_item_of_its_group_and_of_no_other() -> None:
    told: list[float] = []
    refused: list[str] = []
    together: Together[float, float] = Together(roots, lambda each: abs(each) > 10)
    for each in (4.0, -1.0, 16.0, 9.0):
        together.add(each, told.append, refused.append)
    together.finish()
    assert (told, refused) == ([4.0], ["no root of -1.0"] * 3)


def test_an_error_where_an_item_is_given_is_its_own() -> None:
    told: list[float] = []
    refused: list[str] = []

    def give(root: float) -> None:
        if root == 3:
            raise ZeroDivisionError("three")
        told.append(root)

    together: Together[float, float] = Together(roots, lambda each: 0)
    for each in (4.0, 9.0, 16.0):
        together.add(each, give, refused.append)
    together.finish()
    assert (told, refused) == ([2.0, 4.0], ["looking at it raised ZeroDivisionError: three"])


@pytest.mark.parametrize("module", [attention, residual])
def test_numbers_that_cannot_be_told_are_skips_with_their_reason(
    monkeypatch: pytest.MonkeyPatch, module: object
) -> None:
    def fails(items: Sequence[object]) -> list[object]:
        raise ArithmeticError("no numbers today")

    where = "normprobe.measures.forward.tell" if module is attention else "normprobe.measures.residual.tell"
    monkeypatch.setattr(where, fails)
    case = llama()
    found, skipped = measure_forward(case.model, case.inputs, anatomy_of(case.model, case.inputs))
    reasons = {one.why for one in skipped}
    assert reasons == {"looking at it raised ArithmeticError: no numbers today"}
    assert len(skipped) == (3 if module is attention else 6)
    assert (len(found.attention), len(found.residual)) == ((0, 1) if module is attention else (3, 0))


class Adding(nn.Module):
    """More writes than wait for each other, of which the last breaks what is told of them."""

    def __init__(self, writes: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 8)) for _ in range(writes))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + block(x)
        return x


def test_all_writes_of_a_group_have_the_reason_though_one_of_them_fills_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(items: Sequence[object]) -> list[object]:
        raise ValueError("no numbers today")

    monkeypatch.setattr("normprobe.measures.residual.tell", fails)
    model, x = Adding(18), torch.randn(2, 5, 8)
    _, skipped = measure_forward(model, x, anatomy_of(model, x))
    assert [one.why for one in skipped] == ["no numbers today"] * 18
