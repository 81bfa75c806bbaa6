"""Tensors to numbers, against closed forms and references written out in float64."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from normprobe import stats

NAN, INF = math.nan, math.inf


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("axis", [-1, 1, 0])
def test_token_rms_matches_float64(dtype: torch.dtype, axis: int) -> None:
    x = (torch.randn(3, 5, 7) * 200).to(dtype)
    reference = x.double().square().mean(axis).sqrt()
    got = stats.token_rms(x, axis)
    assert got.dtype is (torch.float64 if dtype is torch.float64 else torch.float32)
    torch.testing.assert_close(got.double(), reference, rtol=1e-6, atol=0)


def test_token_rms_of_a_constant_row_is_its_magnitude_even_where_squares_leave_float32() -> None:
    sizes = torch.tensor([1e-30, 0.0, 1.0, 3e38])
    torch.testing.assert_close(stats.token_rms(-sizes[:, None].expand(4, 8)), sizes, rtol=1e-6, atol=0)


def test_narrow_types_are_widened_to_float32() -> None:
    assert stats.widen(torch.tensor(1e5, dtype=torch.bfloat16)).item() == pytest.approx(1e5, rel=2**-8)
    assert stats.widen(torch.tensor(2**20 + 1)).item() == 2**20 + 1


def test_token_rms_keeps_what_is_not_finite() -> None:
    rows = torch.tensor([[1.0, NAN], [1.0, INF], [-INF, INF], [INF, NAN], [3.0, 4.0]])
    nan, *infinite, nan_too, finite = stats.token_rms(rows).tolist()
    assert math.isnan(nan)
    assert math.isnan(nan_too)
    assert infinite == [INF, INF]
    assert finite == pytest.approx(math.sqrt(12.5))


@given(st.floats(1e-3, 1e3), st.integers(0, 2**31))
def test_token_rms_is_homogeneous(factor: float, seed: int) -> None:
    x = torch.randn(4, 6, generator=torch.Generator().manual_seed(seed))
    torch.testing.assert_close(stats.token_rms(x * factor), stats.token_rms(x) * factor, rtol=1e-5, atol=0)


def quantiles(values: torch.Tensor, levels: tuple[float, ...]) -> tuple[float, ...]:
    return stats.quantile_rows(values.flatten()[None], levels)[0]


def test_quantiles_interpolate_between_order_statistics() -> None:
    values = torch.tensor([[4.0, 1.0], [3.0, 2.0]])
    assert quantiles(values, (0.0, 0.5, 0.75, 1.0)) == (1.0, 2.5, 3.25, 4.0)
    big = torch.randn(999)
    expected = tuple(torch.quantile(big.double(), level).item() for level in (0.5, 0.99))
    assert quantiles(big, (0.5, 0.99)) == pytest.approx(expected, rel=1e-6)


def test_quantiles_of_infinities_are_not_nan_and_of_nan_are() -> None:
    assert quantiles(torch.tensor([1.0, INF, INF]), (0.0, 0.75, 1.0)) == (1.0, INF, INF)
    assert all(math.isnan(value) for value in quantiles(torch.tensor([1.0, NAN]), (0.0, 1.0)))


@pytest.mark.parametrize(("count", "level"), [(0, 0.5), (3, 1.5), (3, NAN)])
def test_quantiles_reject_what_has_none(count: int, level: float) -> None:
    with pytest.raises(ValueError, match="an element and levels in"):
        quantiles(torch.ones(count), (level,))


def test_summary_and_its_argmax() -> None:
    rms = torch.ones(4, 25)
    rms[2, 7] = 9.0
    assert stats.summary(rms) == (1.0, pytest.approx(1.0 + 0.01 * 8), 9.0, 57)
    rms[1, 0] = NAN
    assert stats.summary(rms).argmax == 25
    assert math.isnan(stats.summary(rms).median)
    with pytest.raises(ValueError, match="an element"):
        stats.summary(torch.empty(0))


@given(st.floats(-2, 2), st.floats(1e-3, 1e3), st.integers(4, 200))
def test_growth_recovers_a_power_law(exponent: float, scale: float, writes: int) -> None:
    fit = stats.growth([scale * step**exponent for step in range(1, writes + 1)])
    assert fit.exponent == pytest.approx(exponent, abs=1e-9)
    assert fit.interval == pytest.approx((exponent, exponent), abs=1e-6)
    assert fit.writes == writes


def test_growth_of_a_noisy_stream_matches_least_squares() -> None:
    values = (torch.arange(1, 41).double().sqrt() * torch.exp(0.1 * torch.randn(40).double())).tolist()
    x = torch.arange(1, 41).double().log()
    y = torch.tensor(values, dtype=torch.float64).log()
    design = torch.stack([torch.ones_like(x), x], 1)
    beta = torch.linalg.lstsq(design, y[:, None]).solution[:, 0]
    rest = (y - design @ beta).square().sum()
    error = (rest / 38 * torch.linalg.inv(design.mT @ design)[1, 1]).sqrt().item()
    fit = stats.growth(values)
    assert fit.exponent == pytest.approx(beta[1].item(), rel=1e-10)
    assert fit.interval[1] - fit.exponent == pytest.approx(2.0243942 * error, rel=1e-6)
    assert fit.r_squared == pytest.approx(1 - (rest / (y - y.mean()).square().sum()).item(), rel=1e-10)


def test_growth_interval_covers_the_truth_in_95_percent_of_noisy_streams() -> None:
    noise = 0.2 * torch.randn(2000, 10).double()
    rows = (torch.arange(1, 11).double().sqrt() * noise.exp()).tolist()
    fits = [stats.growth(row) for row in rows]
    covered = sum(fit.interval[0] <= 0.5 <= fit.interval[1] for fit in fits) / 2000
    assert covered == pytest.approx(0.95, abs=0.015)  # three standard deviations


def test_growth_of_a_constant_stream_is_zero_and_has_no_spread_to_explain() -> None:
    fit = stats.growth([2.0] * 6)
    assert (fit.exponent, fit.interval) == (0.0, (0.0, 0.0))
    assert math.isnan(fit.r_squared)


@pytest.mark.parametrize("values", [[], [1.0] * 3, [1.0, 2.0, NAN, 4.0], [1.0, 2.0, 3.0, INF], [1, 1, 1, 0.0]])
def test_growth_is_nan_where_there_is_nothing_to_fit(values: list[float]) -> None:
    fit = stats.growth(values)
    assert all(math.isnan(number) for number in (fit.exponent, *fit.interval, fit.r_squared))
    assert fit.writes == len(values)


@pytest.mark.parametrize(
    ("freedom", "expected"),
    [
        (1, 12.7062047),
        (2, 4.3026527),
        (3, 3.1824463),
        (4, 2.7764451),
        (9, 2.2621572),
        (30, 2.0422725),
        (58, 2.0017175),
    ],
)
def test_student_t_matches_the_table(freedom: int, expected: float) -> None:
    assert stats.student_t(0.95, freedom) == pytest.approx(expected, rel=1e-7)


@pytest.mark.parametrize(("coverage", "freedom"), [(0.0, 3), (1.0, 3), (0.95, 0)])
def test_student_t_rejects_what_has_no_answer(coverage: float, freedom: int) -> None:
    with pytest.raises(ValueError, match="0 < coverage < 1 and freedom >= 1"):
        stats.student_t(coverage, freedom)


@given(st.integers(1, 40), st.integers(1, 6), st.integers(0, 2**31))
def test_medians_are_those_of_each_row(columns: int, rows: int, seed: int) -> None:
    values = torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    assert stats.medians(values) == pytest.approx([quantiles(row, (0.5,))[0] for row in values], rel=1e-12)


def test_a_row_with_a_nan_has_no_median_and_others_keep_theirs() -> None:
    first, second = stats.medians(torch.tensor([[1.0, NAN, 2.0], [3.0, INF, 1.0]]))
    assert math.isnan(first)
    assert second == 3.0
    with pytest.raises(ValueError, match=r"an element in each row, found shape \(2, 0\)"):
        stats.medians(torch.zeros(2, 0))


@given(st.integers(0, 2**31), st.sampled_from([1e-12, 1.0, 1e12]))
def test_stable_rank_is_the_quotient_of_the_two_norms(seed: int, scale: float) -> None:
    rows = scale * torch.randn(9, 20, generator=torch.Generator().manual_seed(seed))
    singular = torch.linalg.svdvals(rows.double())
    expected = float(singular.square().sum() / singular[0] ** 2)
    assert stats.stable_rank(rows) == pytest.approx(expected, rel=1e-3)


def test_stable_rank_at_its_ends() -> None:
    assert stats.stable_rank(torch.ones(5, 3) * torch.arange(1, 6)[:, None]) == pytest.approx(1.0)
    assert stats.stable_rank(torch.eye(6)) == pytest.approx(6.0)
    assert math.isnan(stats.stable_rank(torch.zeros(3, 4)))
    assert math.isnan(stats.stable_rank(torch.tensor([[1.0, INF]])))


def test_participation_counts_the_weights_that_carry_the_sum() -> None:
    assert stats.participation([2.0] * 7) == pytest.approx(7.0)
    assert stats.participation([5.0, 0.0, 0.0]) == pytest.approx(1.0)
    assert math.isnan(stats.participation([]))
    assert math.isnan(stats.participation([1.0, NAN]))


@pytest.mark.parametrize("scale", [1e-30, 1e-10, 1.0, 1e10, 1e30])
def test_norms_hold_at_every_scale(scale: float) -> None:
    x = torch.randn(4, 33, dtype=torch.float64) * scale
    found = stats.norms(x.float()).double()
    assert torch.allclose(found, torch.linalg.vector_norm(x, dim=-1), rtol=1e-5, atol=0)
