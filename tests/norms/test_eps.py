"""Eps and its placement are recovered, whatever their values."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from normprobe.norms.eps import Eps, as_tensor, recover, rounded
from normprobe.norms.identify import identify_module
from tests.norms import zoo

PLACEMENTS = ("inside_sqrt", "outside_sqrt", "clamp")


@settings(max_examples=25, deadline=None, derandomize=True)
@given(exponent=st.floats(-12, -2), placement=st.sampled_from(PLACEMENTS))
def test_random_eps_of_a_root_mean_square_norm(exponent: float, placement: str) -> None:
    spec = identify_module(zoo.RMSNorm(10**exponent, placement=placement), zoo.call_of(zoo.ROWS))
    assert spec is not None
    assert spec.eps_placement == placement
    assert spec.eps == pytest.approx(10**exponent, rel=0.01)


@settings(max_examples=15, deadline=None, derandomize=True)
@given(exponent=st.floats(-12, -2), dtype=st.sampled_from((torch.float32, torch.bfloat16, torch.float16)))
def test_random_eps_of_a_layer_norm(exponent: float, dtype: torch.dtype) -> None:
    norm = nn.LayerNorm(zoo.WIDTH, eps=10**exponent, dtype=dtype)
    spec = identify_module(norm, zoo.call_of(zoo.ROWS, dtype=dtype))
    assert spec is not None
    assert (spec.kind, spec.eps_placement) == ("layernorm", "inside_sqrt")
    assert spec.eps == pytest.approx(10**exponent, rel=0.01)


@settings(max_examples=10, deadline=None, derandomize=True)
@given(exponent=st.floats(-5, -3))
def test_random_scaled_eps(exponent: float) -> None:
    spec = identify_module(zoo.RMSNorm(10**exponent, placement="scaled"), zoo.call_of(zoo.ROWS))
    assert spec is not None
    assert (spec.eps_placement, spec.eps) == ("scaled", pytest.approx(10**exponent, rel=0.01))


def test_an_eps_that_vanishes_in_float16_is_told() -> None:
    spec = identify_module(zoo.HalfLayerNorm(1e-12).half(), zoo.call_of(zoo.ROWS, dtype=torch.float16))
    assert spec is not None
    told = " ".join(spec.evidence)
    assert "on a float32 copy" in told
    assert "float16 itself: no eps" in told


def test_another_law_is_unknown() -> None:
    eps = recover(lambda s: (s * s, s / (s**0.5 + s)), torch.float64, lambda: True)
    assert (eps.value, eps.placement) == (None, "unknown")


def test_no_eps_with_a_guarded_zero_row_is_unknown() -> None:
    assert recover(lambda s: (s * s, 1.0), torch.float32, lambda: True).placement == "unknown"
    assert recover(lambda s: (s * s, 1.0), torch.float32, lambda: False).placement == "none"


def test_an_eps_held_on_meta_is_unknown() -> None:
    drawn = Eps(0.75, "inside_sqrt", "eps 0.75")
    held = as_tensor(drawn, {"eps": torch.tensor(0.75)}, {"eps": torch.tensor(float("nan"))})
    assert (held.value, held.placement) == (None, "unknown")


def test_digits_follow_the_spread() -> None:
    assert rounded(1.56249e-7, 1e-6) == 1.562e-7
    assert rounded(1.5625e-7, 5e-3) == 1.56e-7
    assert rounded(1.5625e-7, 0.05) == 1.6e-7


ROOT_OF_1E6 = 1e-3


@pytest.mark.parametrize(
    ("divisor", "eps", "clamps"),
    [
        (lambda x: x.square().mean(-1, keepdim=True).sqrt().clamp(min=1e-5), 1e-5, "root"),
        (lambda x: x.square().mean(-1, keepdim=True).clamp(min=1e-6).sqrt(), ROOT_OF_1E6, "mean_square"),
        (lambda x: x.var(-1, keepdim=True, correction=0).clamp(min=1e-6).sqrt(), ROOT_OF_1E6, "mean_square"),
        (lambda x: x.norm(dim=-1, keepdim=True).clamp(min=1e-5), 1e-5, "root"),
        (lambda x: x.square().sum(-1, keepdim=True).clamp(min=1e-6).sqrt(), ROOT_OF_1E6, "mean_square"),
        (lambda x: torch.maximum(x.square().mean(-1, keepdim=True).sqrt(), torch.tensor(1e-5)), 1e-5, None),
        (lambda x: (x.square().mean(-1, keepdim=True) + 1e-6).sqrt(), 1e-6, None),
    ],
)
def test_the_constants_tell_what_a_clamp_bounds(
    divisor: Callable[[Tensor], Tensor], eps: float, clamps: str | None
) -> None:
    def forward(self: zoo.Rule, x: Tensor) -> Tensor:
        centred = "var" in divisor.__code__.co_names
        return (x - x.mean(-1, keepdim=True) if centred else x) / divisor(x) * self.w

    spec = identify_module(zoo.Rule(forward, w=torch.rand(zoo.WIDTH) + 0.5), zoo.call_of(zoo.ROWS))
    assert spec is not None
    assert (spec.eps, spec.eps_clamps) == (pytest.approx(eps, rel=0.01), clamps)
