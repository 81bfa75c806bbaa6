"""Where the statistic is reduced, and whether the gain comes before the cast."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from normprobe.norms.identify import identify_module
from tests.norms import zoo

COMBINATIONS = [
    *itertools.product(
        (True, False),
        ("before_cast", "after_cast"),
        (True, False),
        (torch.float32, torch.bfloat16, torch.float16),
    )
]


@pytest.mark.parametrize(
    ("upcast", "multiply", "one_plus", "dtype"),
    COMBINATIONS,
)
def test_every_combination(upcast: bool, multiply: str, one_plus: bool, dtype: torch.dtype) -> None:
    norm = zoo.RMSNorm(upcast=upcast, multiply=multiply, one_plus=one_plus).to(dtype)
    spec = identify_module(norm, zoo.call_of(zoo.ROWS, dtype=dtype))
    assert spec is not None
    wanted = ("float32", multiply) if upcast else ("input", "after_cast")
    assert (spec.reduction, spec.weight_multiply) == wanted


def test_upcast_after_squaring_overflows_all_the_same() -> None:
    norm = zoo.Rule(lambda self, x: x * torch.rsqrt(x.pow(2).float().mean(-1, keepdim=True) + 1e-6).to(x.dtype))
    spec = identify_module(norm, zoo.call_of(zoo.ROWS))
    assert spec is not None
    assert spec.reduction == "input"


def test_record_and_behaviour_that_disagree_are_unknown() -> None:
    """The first square is in float32, but the one that counts is in half."""

    def rule(self: nn.Module, x: Tensor) -> Tensor:
        decoy = x.float().pow(2).mean() * 0
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) + decoy.to(x.dtype)

    spec = identify_module(zoo.Rule(rule), zoo.call_of(zoo.ROWS))
    assert spec is not None
    assert spec.kind == "rmsnorm"
    assert spec.reduction == "unknown"


def test_a_gain_outside_the_fused_kernel() -> None:
    norm = zoo.Rule(lambda self, x: F.layer_norm(x, (zoo.WIDTH,)) * self.w, w=zoo.ones(zoo.WIDTH))
    spec = identify_module(norm, zoo.call_of(zoo.ROWS))
    assert spec is not None
    assert (spec.fused, spec.weight_multiply) == (True, "after_cast")


def test_a_gain_rounded_before_it_is_multiplied_in_float32() -> None:
    def rule(self: nn.Module, x: Tensor) -> Tensor:
        z = x.float() * torch.rsqrt(zoo.mean_square(x.float()) + 1e-6)
        return (z * (1 + self.w).float()).to(x.dtype)

    spec = identify_module(zoo.Rule(rule, w=torch.zeros(zoo.WIDTH)), zoo.call_of(zoo.ROWS))
    assert spec is not None
    assert (spec.affine, spec.weight_multiply) == ("one_plus_weight", "before_cast")
