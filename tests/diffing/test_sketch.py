"""Sketches tell distances: exactly where all elements are kept, within a few percent where sums are."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from normprobe.diffing.sketch import BUCKETS, Sketcher, arranged, cosine, error


def exact(a: torch.Tensor, b: torch.Tensor) -> float:
    a, b = a.double(), b.double()
    return float((b - a).norm() / max(a.norm(), b.norm()))


@given(st.integers(1, 400), st.floats(1e-9, 10.0), st.integers(0, 99))
def test_a_small_tensor_is_kept_whole(count: int, size: float, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    a = torch.randn(count, generator=generator, dtype=torch.float64)
    b = a + size * torch.randn(count, generator=generator, dtype=torch.float64)
    one, other = Sketcher(0)(a), Sketcher(0)(b)
    assert one.exact
    assert error(one, other) == pytest.approx(exact(a, b), rel=1e-9)
    assert cosine(one, other) == pytest.approx(float(torch.cosine_similarity(a, b, 0)), abs=1e-9)


@pytest.mark.parametrize("kind", ["everywhere", "one channel", "one token", "one element", "opposites", "scale"])
def test_a_large_tensor_is_told_within_a_few_percent(kind: str) -> None:
    a = torch.randn(300, 128)
    b, noise = a.clone(), 1e-4 * torch.randn(300, 128)
    if kind == "everywhere":
        b += noise
    elif kind == "one channel":
        b[:, 7] += noise[:, 7]
    elif kind == "one token":
        b[5] += noise[5]
    elif kind == "one element":
        b[5, 7] += 1e-3
    elif kind == "opposites":  # one bucket would hold each of them with its opposite
        flat = b.view(-1)
        flat[:BUCKETS] += 1e-3
        flat[BUCKETS : 2 * BUCKETS] -= 1e-3
    else:
        b *= 1.0001
    one, other = Sketcher(3)(a), Sketcher(3)(b)
    assert not one.exact
    assert len(one.values) == BUCKETS
    assert one.size == pytest.approx(float(a.double().norm()), rel=1e-9)
    assert error(one, other) == pytest.approx(exact(a, b), rel=0.15)


def test_equal_tensors_have_no_distance_and_the_cosine_one() -> None:
    a = torch.randn(100, 100)
    one, other = Sketcher(0)(a), Sketcher(0)(a.clone())
    assert error(one, other) == 0.0
    assert cosine(one, other) == pytest.approx(1.0, abs=1e-12)


def test_a_factor_is_that_of_the_tensor() -> None:
    a = torch.randn(100, 100, dtype=torch.float64)
    assert error(Sketcher(0)(a).times(2.0), Sketcher(0)(2 * a)) < 1e-15


def test_what_is_not_finite() -> None:
    a, b = Sketcher(0)(torch.tensor([1.0, math.nan])), Sketcher(0)(torch.tensor([1.0, 2.0]))
    assert error(a, b) == error(b, a) == math.inf
    assert math.isnan(error(a, a))
    assert math.isnan(cosine(a, b))
    zero = Sketcher(0)(torch.zeros(2))
    assert error(zero, zero) == 0.0
    assert error(zero, b) == 1.0


def test_arranged_finds_the_layout() -> None:
    x = torch.arange(24.0).view(2, 3, 4)
    assert arranged(x, (2, 3, 4)) is not None
    moved = arranged(x.permute(2, 0, 1), (2, 3, 4))
    assert moved is not None
    assert torch.equal(moved, x)
    flat = arranged(x.reshape(6, 4), (2, 3, 4))
    assert flat is not None
    assert torch.equal(flat, x)
    single = arranged(x[:1], (3, 4))
    assert single is not None
    assert torch.equal(single, x[0])
    assert arranged(x, (2, 3, 5)) is None
    assert arranged(x.reshape(4, 6), (2, 3, 4)) is None
