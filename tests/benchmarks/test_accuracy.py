"""The accuracy benchmark, as far as it needs no checkpoint: its reference, and what it makes of errors."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from benchmarks import accuracy, reference
from benchmarks.accuracy import Figures, Sampled


def test_attention_of_equal_logits_is_uniform() -> None:
    q, k = torch.zeros(2, 4, 3, dtype=torch.float64), torch.ones(2, 4, 3, dtype=torch.float64)
    found = reference.head_numbers(q, k, *reference.causal(q, k))
    assert found["sampled_max"] == found["std"] == found["saturated"] == found["q_rms"] == found["bound"] == [0.0, 0.0]
    assert found["entropy"] == pytest.approx([1.0, 1.0])
    assert found["first_token"] == pytest.approx([(1 + 1 / 2 + 1 / 3 + 1 / 4) / 4] * 2)


def test_attention_by_definition_is_torchs() -> None:
    q, k, v = torch.randn(3, 1, 4, 6, 8, generator=torch.Generator().manual_seed(0)).double()
    right = scaled_dot_product_attention(q, k[:, :2].repeat_interleave(2, 1), v, is_causal=True)
    with reference.Attention(own=True) as looked:
        found = scaled_dot_product_attention(q, k[:, :2].repeat_interleave(2, 1), v, is_causal=True)
    assert torch.allclose(found, right)
    assert len(looked.layers) == 1


def test_a_write_that_doubles_the_trunk() -> None:
    trunk = torch.tensor([[3.0, 4.0], [0.0, 5.0]], dtype=torch.float64)
    found = reference.write_numbers(trunk, trunk, 2 * trunk)
    assert found["rms_median"] == pytest.approx(math.sqrt(50))
    assert found["write_ratio"] == found["write_cosine"] == pytest.approx(1.0)
    assert found["write_share"] == pytest.approx(0.5)
    assert found["angle"] == pytest.approx(0.0, abs=1e-6)
    assert found["token_cosine"] == pytest.approx(0.8)


def test_errors_are_relative_except_where_a_number_may_be_0() -> None:
    true = [{"rms": 2.0, "mean": 0.0, "std": 4.0, "entropy": [0.5, 0.0]}]
    told = [SimpleNamespace(rms=2.2, mean=0.4, std=4.0, entropy=[0.5, 0.01])]
    assert accuracy.errors(true, told) == pytest.approx({"rms": 0.1, "mean": 0.1, "std": 0.0, "entropy": 0.01})


def attention(numbers: list[float], margin: float = 0.1) -> list[SimpleNamespace]:
    """One site with a head for each number, which all statistics have."""
    margins = SimpleNamespace(**dict.fromkeys(accuracy.SAMPLED, margin))
    return [
        SimpleNamespace(
            heads=[SimpleNamespace(margins=margins, **dict.fromkeys(accuracy.SAMPLED, number)) for number in numbers]
        )
    ]


def test_how_often_intervals_hold_in_all_heads_and_in_the_worst() -> None:
    samples = [
        attention([1.0, 2.0]),
        attention([1.05, 2.3], margin=0.2),
        attention([0.95, 2.0]),
        attention([1.0, math.nan]),
    ]
    found = accuracy.sampled(attention([1.0, 2.0]), samples)
    assert found["std"][:3] == pytest.approx((6 / 8, 1 / 2, 0.1))
    assert list(found) == ["std", "entropy", "saturated", "first_token"]


def test_limits_hold_against_nan_too() -> None:
    found = {"std": Sampled(0.98, 0.9, 0.1, 0.2), "entropy": Sampled(1.0, 1.0, 0.1, 0.2)}
    told = list(accuracy.misses(Figures(found, 1, {"a": 1e-6, "b": math.nan}, {})))
    assert told[0] == "std: 98.0% inside the interval"
    assert told[1:] == ["sampled maximum <= maximum <= bound fails 1 times", "b: off by nan"]


def test_the_tables() -> None:
    found = Figures({"std": Sampled(0.995, 0.93, 0.1, 0.2)}, 0, {"stream rms": 1e-7}, {"stream rms": 2e-6})
    text = accuracy.section(found, "How.")
    assert "| std | 99.5% | 93% | 0.1 | 0.2 |" in text
    assert "| stream rms | 1.0e-07 | 2.0e-06 |" in text
    assert "missed" not in text
