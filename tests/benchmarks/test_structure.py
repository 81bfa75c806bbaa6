"""Limits, medians and the section of the structure benchmark."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from benchmarks import structure


def run(probe: float = 2.0, memory: float = 1.0) -> dict[str, Any]:
    return {"building": 0.5, "bare": 0.5, "probe": probe, "memory": memory, "experts": "", "blocks": 4, "norms": 5}


def test_medians_are_of_each_number_and_of_the_ratio() -> None:
    found = structure.medians([run(1.0), run(9.0), run(2.0)])
    assert (found["probe"], found["ratio"], found["memory"]) == (2.0, 2.0, 1.0)


@pytest.mark.parametrize(
    ("found", "missed"),
    [
        (run(2.9), []),
        (run(3.1), ["A: probe takes 3.1 times"]),
        (run(memory=1.6), ["A: peak memory 1.60 GB"]),
        (run(float("nan")), ["A: probe takes nan times"]),
    ],
)
def test_limits(found: dict[str, Any], missed: list[str]) -> None:
    told = structure.misses({"A": structure.medians([found])})
    assert len(told) == len(missed)
    assert all(text.startswith(start) for text, start in zip(told, missed, strict=True))


def test_growth_with_depth_has_a_limit() -> None:
    results = {f"GPT-2, {n} blocks": structure.medians([run(t)]) for n, t in ((1000, 2.5), (500, 1.0))}
    assert structure.growth(results) == 2.5
    assert structure.misses(results)[-1] == "1000 blocks take 2.50 times as long as 500"


def test_the_table_has_a_row_for_each_model() -> None:
    text = structure.section({"A": structure.medians([run()])}, repeats=1)
    assert "| A | 4 | 0.50 | 0.50 | 2.00 | 2.00 | 1.00 |" in text
    assert "missed" not in text


def test_values_on_meta_are_answered_inside_alone() -> None:
    flag = torch.zeros(1, dtype=torch.bool, device="meta")
    with structure.answered():
        assert bool(flag)
        assert torch.zeros(1, device="meta").item() == 1.0
    with pytest.raises(RuntimeError, match="cannot be called on meta tensors"):
        bool(flag)


def test_experts_that_run_on_meta_are_found_by_trying() -> None:
    class Mixture(nn.Module):
        chosen = ""

        def set_experts_implementation(self, name: str) -> None:
            self.chosen = name

        def forward(self, input_ids: Any, use_cache: bool) -> None:
            if self.chosen != "grouped_mm":
                raise RuntimeError("real indices needed")

    assert structure.run_on_meta(Mixture(), None) == "grouped_mm"


def test_no_experts_that_run_is_an_error_with_the_reasons() -> None:
    class Never(nn.Module):
        def forward(self, input_ids: Any, use_cache: bool) -> None:
            raise RuntimeError("real indices needed")

    with pytest.raises(RuntimeError, match="no experts implementation runs on meta: default: RuntimeError: real"):
        structure.run_on_meta(Never(), None)
