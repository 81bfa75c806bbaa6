"""Statistics of attention logits against a float64 reference a row at a time."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from normprobe.measures.logit_rows import one_of_each
from normprobe.measures.logits import LogitStats, RowStats, logit_stats, row_stats
from normprobe.measures.qk_norms import Lengths, norms

NAN, INF = math.nan, math.inf


def lengths(q: Tensor, k: Tensor, scale: float | Tensor) -> Lengths:
    return norms(q, k).lengths(scale)


def sampled_logit_stats(
    q: Tensor, k: Tensor, scale: float | Tensor, mask: Tensor | None = None, softcap: float | None = None
) -> LogitStats:
    return logit_stats(row_stats(q, k, scale, mask, softcap))


def reference(q: Tensor, k: Tensor, scale: float, bias: Tensor | None, softcap: float | None) -> list[list[float]]:
    """Every statistic a row at a time in float64, heads expanded; `bias` is additive, -inf masks."""
    rows = []
    for head in range(q.shape[1]):
        key = k[:, head // (q.shape[1] // k.shape[1])].double()
        uncapped = q[:, head].double() @ key.mT * scale
        logits = uncapped if softcap is None else softcap * torch.tanh(uncapped / softcap)
        uncapped = uncapped if bias is None else uncapped.masked_fill(bias == -INF, -INF)
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
                uncapped.max().item(),
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
@pytest.mark.parametrize("kind", ["none", "boolean", "additive", "bias"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_logit_stats_match_float64(softcap: float | None, kind: str, dtype: torch.dtype) -> None:
    q, k, keep = case()
    q, k = q.to(dtype), k.to(dtype)
    bias = torch.zeros(5, 12).masked_fill(~keep, -INF)
    if kind == "bias":
        bias = bias + torch.randn(5, 12)
    mask = {"none": None, "boolean": keep, "additive": bias, "bias": bias}[kind]
    got = sampled_logit_stats(q, k, 0.7, mask=mask, softcap=softcap)
    expected = reference(q, k, 0.7, None if mask is None else bias, softcap)
    assert [list(row)[:6] for row in zip(*got, strict=True)] == [pytest.approx(row, rel=1e-5) for row in expected]
    assert all(margin == 0 for margins in got[6:] for margin in margins)  # all rows were taken


def test_logit_stats_do_find_saturation_and_entropy_at_their_ends() -> None:
    k = torch.eye(4)[None, None]
    flat = sampled_logit_stats(torch.zeros(1, 1, 3, 4), k, 1.0)
    assert flat[:6] == ((0.0,), (0.0,), (0.0,), (pytest.approx(1.0),), (0.0,), (0.25,))
    sharp = sampled_logit_stats(200 * k, k, 1.0)
    assert sharp.saturated == (1.0,)
    assert sharp.entropy[0] < 1e-30
    assert sharp.first_token == (pytest.approx(0.25),)


def test_a_scale_for_each_head_is_applied_to_its_head() -> None:
    q, k, keep = case()
    scales = torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0, 6.0]).reshape(6, 1, 1)
    together = sampled_logit_stats(q, k, scales, mask=keep)
    alone = sampled_logit_stats(q[:, 3:4], k[:, 1:], 4.0, mask=keep)
    assert [values[3] for values in together] == [pytest.approx(values[0], rel=1e-6) for values in alone]
    assert lengths(q, k, scales).bound[3] == pytest.approx(lengths(q[:, 3:4], k[:, 1:], 4.0).bound[0])


def test_rows_without_keys_are_left_out_and_nothing_left_is_nan() -> None:
    q, k, _ = case()
    keep = torch.zeros(5, 12, dtype=torch.bool)
    assert all(math.isnan(value) for values in sampled_logit_stats(q, k, 1.0, mask=keep)[:6] for value in values)
    keep[0, 0] = True  # one row with one key
    one = sampled_logit_stats(q, k, 1.0, mask=keep)
    assert one.first_token == (1.0,) * 6
    assert all(math.isfinite(value) for value in one.max + one.std)
    assert all(math.isnan(value) for value in one.entropy + one.saturated)


@pytest.mark.parametrize("masked", [True, False])
def test_a_nan_in_a_key_is_not_masked_away(masked: bool) -> None:
    q, k, keep = case()
    k[0, 1, 3] = NAN
    got = sampled_logit_stats(q, k, 1.0, mask=keep if masked else None)
    for values in got[:6]:
        assert all(math.isfinite(value) for value in values[:3])
        assert all(math.isnan(value) for value in values[3:])


def test_an_infinite_logit_is_never_reported_as_finite() -> None:
    q, k, _ = case()
    q[0, 2, 1, 0] = INF
    got = sampled_logit_stats(q, k.abs() + 0.1, -1.0)  # every logit of that row is -inf
    assert math.isfinite(got.max[1])
    assert not math.isfinite(got.std[2])


@given(st.integers(0, 2**31), st.sampled_from([0.1, -0.5, 3.0]))
def test_the_bound_bounds_every_logit_and_is_reached_by_parallel_vectors(seed: int, scale: float) -> None:
    generator = torch.Generator().manual_seed(seed)
    q, k = torch.randn(2, 4, 6, 8, generator=generator), torch.randn(2, 2, 7, 8, generator=generator)
    logits = (q.double() @ k.double().repeat_interleave(2, 1).mT * scale).abs().amax((0, 2, 3))
    bound = lengths(q, k, scale).bound
    assert all(b * (1 + 1e-6) >= largest for b, largest in zip(bound, logits.tolist(), strict=True))
    row = q[:1, :1, :1]
    assert lengths(row, 2 * row, scale).bound[0] == pytest.approx(2 * abs(scale) * row.square().sum().item(), rel=1e-5)


def test_the_bound_takes_each_group_of_query_heads_with_its_own_key_head() -> None:
    q, k = torch.ones(1, 4, 1, 4), torch.ones(1, 2, 1, 4) * torch.tensor([1.0, 10.0]).reshape(2, 1, 1)
    assert lengths(q, k, 0.5).bound == pytest.approx((2.0, 2.0, 20.0, 20.0))


def test_shapes_that_do_not_fit_are_named() -> None:
    q, k, _ = case()
    with pytest.raises(ValueError, match=r"do not fit: \[2, 6, 5, 8\] and \[2, 2, 12, 7\]"):
        sampled_logit_stats(q, k[..., :7], 1.0)
    with pytest.raises(ValueError, match="do not fit"):
        sampled_logit_stats(q[:, :5], k, 1.0)
    with pytest.raises(ValueError, match="5 query heads do not share 2 key heads"):
        lengths(q[:, :5], k, 1.0)


def test_rms_of_queries_and_keys() -> None:
    q, k, _ = case()
    found = lengths(q, k, 0.5)
    assert found.q_rms == pytest.approx(q.double().square().mean((0, 2, 3)).sqrt().tolist(), rel=1e-5)
    assert found.k_rms == pytest.approx(
        k.double().square().mean((0, 2, 3)).sqrt().repeat_interleave(3).tolist(), rel=1e-5
    )


def test_logits_far_from_zero_keep_their_standard_deviation() -> None:
    k = torch.randn(1, 1, 200, 8, dtype=torch.float64)
    q = torch.randn(1, 1, 30, 8, dtype=torch.float64)
    bias = torch.full((30, 200), 300.0)
    got = sampled_logit_stats(q.float(), k.float(), 1.0, mask=bias)
    assert got.std[0] == pytest.approx((q @ k.mT).std(correction=0).item(), rel=1e-4)


def drawn(spread: float, tokens: int) -> tuple[LogitStats, list[LogitStats]]:
    """What all rows tell of 300 heads, and six samples of them; the logarithm of queries' lengths has this spread."""
    generator = torch.Generator().manual_seed(1)
    q = torch.randn(1, 300, tokens, 4, generator=generator)
    q = q * (spread * torch.randn(1, 300, tokens, 1, generator=generator)).exp()
    rows = row_stats(q, torch.randn(1, 300, 16, 4, generator=generator), 0.5)
    samples = [RowStats(*(x[..., one_of_each(tokens, seed)] for x in rows)) for seed in range(6)]
    return logit_stats(rows), [logit_stats(some, 64 / tokens) for some in samples]


@pytest.mark.parametrize("tokens", [160, 512])
@pytest.mark.parametrize("spread", [0.0, 0.2, 0.35])
def test_intervals_hold_for_rows_with_heavy_tails_too_and_are_not_idly_wide(spread: float, tokens: int) -> None:
    every, samples = drawn(spread, tokens)
    for name in ("std", "entropy", "saturated", "first_token"):
        true = torch.tensor(getattr(every, name))
        off = torch.stack([torch.tensor(getattr(some, name)) for some in samples]) - true
        margins = torch.stack([torch.tensor(getattr(some, f"{name}_margin")) for some in samples])
        assert (off.abs() <= margins).double().mean() >= 0.99, name
        if name in ("std", "entropy"):
            assert margins.median() < 4.2 * off.square().mean().sqrt(), "2.58 were all known but the mean"


@pytest.mark.parametrize(("rows", "student"), [(3, 9.925), (6, 4.032), (11, 3.169), (31, 2.750), (64, 2.656)])
def test_the_interval_of_a_mean_widens_with_few_rows_and_with_rows_far_off(rows: int, student: float) -> None:
    generator = torch.Generator().manual_seed(rows)
    entropy = torch.rand(rows, generator=generator, dtype=torch.float64)
    entropy[0] += 3
    seen, one = torch.full((1, 1, rows), 2.0), torch.ones(1, 1, rows)
    rows_seen = RowStats(one, one, one, one, 0 * one, entropy[None, None], seen, -one, one)
    margin = logit_stats(rows_seen, 0.25).entropy_margin[0]
    ratios = entropy / math.log(2)
    apart = ratios - ratios.mean()
    kurtosis = apart.pow(4).mean() / apart.square().mean().square()
    error = ratios.std() / math.sqrt(rows) * (1 + 2.576 * ((kurtosis - 1) / (4 * rows)).sqrt())
    assert margin == pytest.approx(student * error.item() * math.sqrt(0.75), rel=0.07 if rows == 3 else 0.01)


def test_rows_that_are_alike_leave_no_doubt_and_two_rows_leave_it_unknown() -> None:
    q, k = torch.ones(1, 1, 8, 4), torch.randn(1, 1, 6, 4)
    alike = logit_stats(row_stats(q, k, 1.0), 0.5)
    assert (alike.std_margin[0], alike.entropy_margin[0]) == pytest.approx((0.0, 0.0), abs=1e-6)
    two = logit_stats(row_stats(q[:, :, :2], k, 1.0), 0.5)
    assert math.isnan(two.std_margin[0])
    assert math.isnan(two.entropy_margin[0])
    assert math.isfinite(two.saturated_margin[0] + two.first_token_margin[0])


def test_the_interval_of_a_share_is_the_widest_with_two_of_either_end_added() -> None:
    generator = torch.Generator().manual_seed(2)
    q, k = (torch.randn(1, 1, 12, 4, generator=generator) for _ in range(2))
    found = logit_stats(row_stats(20 * q, k, 1.0, torch.ones(12, 12, dtype=torch.bool).tril()), 0.25)
    assert 0 < found.saturated[0] < 1
    for mean, margin, rows in (
        (found.saturated[0], found.saturated_margin[0], 11),  # the first row sees one key
        (found.first_token[0], found.first_token_margin[0], 12),
    ):
        centre = (mean * rows + 2) / (rows + 4)
        assert margin == pytest.approx(2.576 * math.sqrt(centre * (1 - centre) / (rows + 4) * 0.75), rel=1e-6)
