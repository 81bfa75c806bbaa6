"""Finite or not, through every container, and the module that broke it, with nothing left behind."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import normprobe
from normprobe.measures.finite import all_finite, first_broken_module
from tests.trace import Snapshot

NAN, ONES = torch.tensor([1.0, float("nan")]), torch.ones(2)


@dataclass
class Output:
    x: Any


@pytest.mark.parametrize("pack", [lambda t: t, Output, lambda t: {"a": [Output((t,))]}])
def test_not_finite_wherever_it_stands(pack: Any) -> None:
    assert all_finite(pack(NAN)) is False
    assert all_finite(pack(ONES)) is True
    assert all_finite(pack(torch.ones(2, dtype=torch.int64))) is None


class Breaks(nn.Module):
    """Its input is overwritten, its embedding renormalised, and its second layer divides by zero."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.first, self.second = nn.Embedding(3, 4, max_norm=0.1), nn.Linear(4, 4), Divides()

    def forward(self, x: Tensor) -> Output:
        x.add_(1)
        self.first.bias.data.add_(1)
        return Output(self.second(self.first(x + self.table(torch.arange(3)))))


class Divides(nn.Module):
    def forward(self, x: Tensor) -> Output:
        return Output(x / 0)


def test_the_module_is_found_and_nothing_is_left_behind() -> None:
    model, x = Breaks(), torch.ones(3, 4)
    before = Snapshot(model, x)
    assert first_broken_module(model, x) == "second"
    before.assert_kept()


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz])
def test_floats_that_torch_only_stores(dtype: torch.dtype) -> None:
    assert all_finite(ONES.to(dtype)) is True
    assert all_finite(NAN.to(dtype)) is False
    model = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4))
    model.register_buffer("scales", ONES.to(dtype))
    assert normprobe.probe(model, torch.randn(2, 4)).measurements.output_finite is True


def test_packed_floats_of_four_bits_are_finite() -> None:
    packed = getattr(torch, "float4_e2m1fn_x2", None)
    if packed is None:
        pytest.skip("this torch has no such dtype")
    assert all_finite(torch.zeros(4, dtype=torch.uint8).view(packed)) is True
