"""Tensors to numbers, against closed forms and references written out in float64."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

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


def test_quantiles_interpolate_between_order_statistics() -> None:
    values = torch.tensor([[4.0, 1.0], [3.0, 2.0]])
    assert stats.quantiles(values, (0.0, 0.5, 0.75, 1.0)) == (1.0, 2.5, 3.25, 4.0)
    big = torch.randn(999)
    expected = tuple(torch.quantile(big.double(), level).item() for level in (0.5, 0.99))
    assert stats.quantiles(big, (0.5, 0.99)) == pytest.approx(expected, rel=1e-6)


def test_quantiles_of_infinities_are_not_nan_and_of_nan_are() -> None:
    assert stats.quantiles(torch.tensor([1.0, INF, INF]), (0.0, 0.75, 1.0)) == (1.0, INF, INF)
    assert all(math.isnan(value) for value in stats.quantiles(torch.tensor([1.0, NAN]), (0.0, 1.0)))


@pytest.mark.parametrize(("count", "level"), [(0, 0.5), (3, 1.5), (3, NAN)])
def test_quantiles_reject_what_has_none(count: int, level: float) -> None:
    with pytest.raises(ValueError, match="an element and levels in"):
        stats.quantiles(torch.ones(count), (level,))


def test_summary_and_its_argmax() -> None:
    rms = torch.ones(4, 25)
    rms[2, 7] = 9.0
    assert stats.summary(rms) == (1.0, pytest.approx(1.0 + 0.01 * 8), 9.0, 57)
    rms[1, 0] = NAN
    assert stats.summary(rms).argmax == 25
    assert math.isnan(stats.summary(rms).median)
    with pytest.raises(ValueError, match="an element"):
        stats.summary(torch.empty(0))


@pytest.mark.parametrize("axis", [-1, 1])
def test_peak_names_entry_channel_and_token(axis: int) -> None:
    x = torch.randn(2, 5, 4).to(torch.bfloat16)
    x.movedim(axis, -1)[1, 3, 2] = -64.0
    width = x.movedim(axis, -1).shape[1]
    assert stats.peak(x, axis) == (64.0, -64.0, 2, width + 3)
    x[0, 0, 0] = NAN
    assert math.isnan(stats.peak(x, axis).abs_max)
    with pytest.raises(ValueError, match="at least one element, found shape"):
        stats.peak(torch.empty(0, 3))


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


def test_growth_of_a_constant_stream_is_zero_and_fits() -> None:
    fit = stats.growth([2.0] * 6)
    assert (fit.exponent, fit.r_squared) == (0.0, 1.0)


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


def reference(q: Tensor, k: Tensor, scale: float, bias: Tensor | None, softcap: float | None) -> list[list[float]]:
    """Every statistic a row at a time in float64, heads expanded; `bias` is additive, -inf masks."""
    rows = []
    for head in range(q.shape[1]):
        key = k[:, head // (q.shape[1] // k.shape[1])].double()
        logits = q[:, head].double() @ key.mT * scale
        logits = logits if softcap is None else softcap * torch.tanh(logits / softcap)
        logits = (logits if bias is None else logits + bias.double()).reshape(-1, k.shape[2])
        kept = [row[row > -INF] for row in logits]
        many = [row for row in kept if len(row) > 1]
        rates = [torch.softmax(row, 0) for row in many]
        ratios = [-(p * p.log()).sum().item() / math.log(len(p)) for p in rates]
        first = [torch.softmax(row, 0)[0].item() for row in logits if (row > -INF).any()]
        pooled = torch.cat(kept)
        rows.append(
            [
                pooled.max().item(),
                pooled.std(correction=0).item(),
                sum(ratios) / len(ratios),
                sum(p.max().item() > 0.99 for p in rates) / len(rates),
                sum(first) / len(first),
            ]
        )
    return rows


def case(scale: float = 3.0) -> tuple[Tensor, Tensor, Tensor]:
    """Two samples, six heads on two key heads, five sampled rows of a causal mask over twelve keys."""
    q, k = torch.randn(2, 6, 5, 8) * scale, torch.randn(2, 2, 12, 8)
    mask = torch.arange(12) <= torch.tensor([0, 2, 5, 8, 11])[:, None]
    return q, k, mask


@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("kind", ["none", "boolean", "additive", "lowest", "bias"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_logit_stats_match_float64(softcap: float | None, kind: str, dtype: torch.dtype) -> None:
    q, k, keep = case()
    q, k = q.to(dtype), k.to(dtype)
    bias = torch.zeros(5, 12).masked_fill(~keep, -INF)
    if kind == "bias":
        bias = bias + torch.randn(5, 12)
    lowest = torch.zeros(5, 12).masked_fill(~keep, torch.finfo(torch.float32).min)
    mask = {"none": None, "boolean": keep, "additive": bias, "lowest": lowest, "bias": bias}[kind]
    got = stats.sampled_logit_stats(q, k, 0.7, mask=mask, softcap=softcap)
    expected = reference(q, k, 0.7, None if mask is None else bias, softcap)
    assert [list(row) for row in zip(*got, strict=True)] == [pytest.approx(row, rel=1e-5) for row in expected]


def test_logit_stats_do_find_saturation_and_entropy_at_their_ends() -> None:
    k = torch.eye(4)[None, None]
    flat = stats.sampled_logit_stats(torch.zeros(1, 1, 3, 4), k, 1.0)
    assert flat == ((0.0,), (0.0,), (pytest.approx(1.0),), (0.0,), (0.25,))
    sharp = stats.sampled_logit_stats(200 * k, k, 1.0)
    assert sharp.saturated == (1.0,)
    assert sharp.entropy[0] < 1e-30
    assert sharp.first_token == (pytest.approx(0.25),)


def test_a_scale_for_each_head_is_applied_to_its_head() -> None:
    q, k, keep = case()
    scales = torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0, 6.0]).reshape(6, 1, 1)
    together = stats.sampled_logit_stats(q, k, scales, mask=keep)
    alone = stats.sampled_logit_stats(q[:, 3:4], k[:, 1:], 4.0, mask=keep)
    assert [values[3] for values in together] == [pytest.approx(values[0], rel=1e-6) for values in alone]
    assert stats.logit_bound(q, k, scales)[3] == pytest.approx(stats.logit_bound(q[:, 3:4], k[:, 1:], 4.0)[0])


def test_rows_without_keys_are_left_out_and_nothing_left_is_nan() -> None:
    q, k, _ = case()
    keep = torch.zeros(5, 12, dtype=torch.bool)
    assert all(math.isnan(value) for values in stats.sampled_logit_stats(q, k, 1.0, mask=keep) for value in values)
    keep[0, 0] = True  # one row with one key
    one = stats.sampled_logit_stats(q, k, 1.0, mask=keep)
    assert one.first_token == (1.0,) * 6
    assert all(math.isfinite(value) for value in one.max + one.std)
    assert all(math.isnan(value) for value in one.entropy + one.saturated)


@pytest.mark.parametrize("masked", [True, False])
def test_a_nan_in_a_key_is_not_masked_away(masked: bool) -> None:
    q, k, keep = case()
    k[0, 1, 3] = NAN
    got = stats.sampled_logit_stats(q, k, 1.0, mask=keep if masked else None)
    for values in got:
        assert all(math.isfinite(value) for value in values[:3])
        assert all(math.isnan(value) for value in values[3:])


def test_an_infinite_logit_is_never_reported_as_finite() -> None:
    q, k, _ = case()
    q[0, 2, 1, 0] = INF
    got = stats.sampled_logit_stats(q, k.abs() + 0.1, -1.0)  # every logit of that row is -inf
    assert math.isfinite(got.max[1])
    assert not math.isfinite(got.std[2])


@given(st.integers(0, 2**31), st.sampled_from([0.1, -0.5, 3.0]))
def test_the_bound_bounds_every_logit_and_is_reached_by_parallel_vectors(seed: int, scale: float) -> None:
    generator = torch.Generator().manual_seed(seed)
    q, k = torch.randn(2, 4, 6, 8, generator=generator), torch.randn(2, 2, 7, 8, generator=generator)
    logits = (q.double() @ k.double().repeat_interleave(2, 1).mT * scale).abs().amax((0, 2, 3))
    bound = stats.logit_bound(q, k, scale)
    assert all(b * (1 + 1e-6) >= largest for b, largest in zip(bound, logits.tolist(), strict=True))
    row = q[:1, :1, :1]
    assert stats.logit_bound(row, 2 * row, scale)[0] == pytest.approx(
        2 * abs(scale) * row.square().sum().item(), rel=1e-5
    )


def test_the_bound_takes_each_group_of_query_heads_with_its_own_key_head() -> None:
    q, k = torch.ones(1, 4, 1, 4), torch.ones(1, 2, 1, 4) * torch.tensor([1.0, 10.0]).reshape(2, 1, 1)
    assert stats.logit_bound(q, k, 0.5) == pytest.approx((2.0, 2.0, 20.0, 20.0))


def test_shapes_that_do_not_fit_are_named() -> None:
    q, k, _ = case()
    with pytest.raises(ValueError, match=r"do not fit: \[2, 6, 5, 8\] and \[2, 2, 12, 7\]"):
        stats.sampled_logit_stats(q, k[..., :7], 1.0)
    with pytest.raises(ValueError, match="do not fit"):
        stats.sampled_logit_stats(q[:, :5], k, 1.0)
    with pytest.raises(ValueError, match="5 query heads do not share 2 key heads"):
        stats.logit_bound(q[:, :5], k, 1.0)
