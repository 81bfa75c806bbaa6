from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from normprobe.measures.attention import LogitHandler, alike, tell
from normprobe.measures.forward import measure_forward
from normprobe.measures.logit_rows import one_of_each, sampled_rows
from normprobe.measures.together import Together
from normprobe.records import AttentionMeasure, AttentionSite, OpSite
from tests.measures.models import Case, anatomy_of, bert, gpt2, llama, neox, t5

SDPA = OpSite(path="a", op="scaled_dot_product_attention")
SOFTMAX = OpSite(path="a", op="aten._softmax.default")


def site(heads: int, where: OpSite = SDPA, **fields: Any) -> AttentionSite:
    return AttentionSite(path="a", heads=heads, kv_heads=heads, head_dim=8, site=where, **fields)


def measured(where: AttentionSite, seed: int = 0, **arguments: Any) -> AttentionMeasure:
    handler = LogitHandler(where, seed)
    handler.before(arguments)
    assert handler.measure is not None
    return handler.measure


def qk(batch: int = 2, heads: int = 4, key_heads: int = 4, rows: int = 10, keys: int = 10) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)
    q = 2 * torch.randn(batch, heads, rows, 8, generator=generator)
    return q, 2 * torch.randn(batch, key_heads, keys, 8, generator=generator)


def reference(logits: Tensor) -> list[dict[str, float]]:
    """The record's definitions, head by head, in float64; `logits` [B, H, R, T] hold −∞ where masked."""
    rows = []
    for head in logits.double().unbind(1):
        flat = head.flatten(0, 1)
        seen = flat > -math.inf
        p = flat.softmax(-1)
        several = seen.sum(-1) > 1
        entropy = -(p * p.clamp_min(1e-300).log()).sum(-1) / seen.sum(-1).clamp_min(2).log()
        rows.append(
            {
                "sampled_max": float(flat[seen].max()),
                "std": float(flat[seen].std(correction=0)),
                "entropy": float(entropy[several].mean()),
                "saturated": float((p.amax(-1)[several] > 0.99).double().mean()),
                "first_token": float(p[:, 0].mean()),
            }
        )
    return rows


def assert_heads(measure: AttentionMeasure, logits: Tensor) -> None:
    expected = reference(logits)
    assert [head.head for head in measure.heads] == list(range(len(expected)))
    for head, numbers in zip(measure.heads, expected, strict=True):
        for name, value in numbers.items():
            assert getattr(head, name) == pytest.approx(value, rel=1e-4, abs=1e-6), name


CAUSAL = torch.ones(10, 10, dtype=torch.bool).tril()
PADDED = torch.ones(2, 1, 1, 10, dtype=torch.bool)
PADDED[1, ..., 7:] = False
BIAS = torch.randn(1, 4, 10, 10, generator=torch.Generator().manual_seed(4))


@pytest.mark.parametrize(
    ("arguments", "bias"),
    [
        ({}, torch.zeros(())),
        ({"is_causal": True}, torch.zeros(10, 10).masked_fill(~CAUSAL, -math.inf)),
        ({"attn_mask": CAUSAL}, torch.zeros(10, 10).masked_fill(~CAUSAL, -math.inf)),
        ({"attn_mask": PADDED}, torch.zeros(2, 1, 1, 10).masked_fill(~PADDED, -math.inf)),
        ({"attn_mask": PADDED & CAUSAL}, torch.zeros(2, 1, 10, 10).masked_fill(~(PADDED & CAUSAL), -math.inf)),
        ({"attn_mask": BIAS}, BIAS),
        ({"attn_mask": BIAS[0]}, BIAS),
        (
            {"attn_mask": torch.zeros(10, 10).masked_fill(~CAUSAL, torch.finfo(torch.float32).min)},
            torch.zeros(10, 10).masked_fill(~CAUSAL, -math.inf),
        ),
        ({"attn_bias": BIAS, "is_causal": True}, BIAS.masked_fill(~CAUSAL, -math.inf)),
    ],
)
def test_masks_and_biases_of_the_composite(arguments: dict[str, Any], bias: Tensor) -> None:
    q, k = qk()
    measure = measured(site(4), query=q, key=k, **arguments)
    assert_heads(measure, q @ k.mT / math.sqrt(8) + bias)
    assert measure.rows == 20
    assert measure.basis.exact


def test_the_scale_argument_is_the_one_in_force() -> None:
    q, k = qk()
    assert_heads(measured(site(4, scale=7.0), query=q, key=k, scale=0.05), 0.05 * q @ k.mT)


def test_a_known_soft_cap_is_applied() -> None:
    q, k = qk()
    assert_heads(measured(site(4, softcap=1.5), query=q, key=k), 1.5 * (q @ k.mT / math.sqrt(8) / 1.5).tanh())


def test_grouped_heads() -> None:
    q, k = qk(key_heads=2)
    measure = measured(site(4), query=q, key=k, is_causal=True)
    logits = q @ k.repeat_interleave(2, 1).mT / math.sqrt(8)
    assert_heads(measure, logits.masked_fill(~CAUSAL, -math.inf))


def test_heads_joined_with_the_batch_and_windows_before_the_heads() -> None:
    q, k = qk()
    logits = q @ k.mT / math.sqrt(8)
    joined = measured(
        site(4), query=q.flatten(0, 1), key=k.flatten(0, 1), attn_mask=BIAS.repeat(2, 1, 1, 1).flatten(0, 1)
    )
    assert_heads(joined, logits + BIAS)
    windows = measured(site(4), query=q[None], key=k[None], attn_mask=PADDED[None])
    assert_heads(windows, logits.masked_fill(~PADDED, -math.inf))


@pytest.mark.parametrize("shape", [(2, 4, 10, 10), (8, 10, 10), (1, 2, 4, 10, 10), (2, 2, 2, 10, 10)])
def test_logits_that_reach_a_softmax(shape: tuple[int, ...]) -> None:
    q, k = qk()
    logits = (q @ k.mT).masked_fill(~CAUSAL, torch.finfo(torch.float32).min)
    measure = measured(site(4, SOFTMAX), self=logits.reshape(shape), dim=-1)
    seen = (q @ k.mT).masked_fill(~CAUSAL, -math.inf)
    assert_heads(measure, seen)
    exact = seen.amax((0, 2, 3))
    assert [head.bound for head in measure.heads] == pytest.approx(exact.tolist())


def test_minus_ten_thousand_is_a_mask() -> None:
    q, k = qk()
    masked = (q @ k.mT).masked_fill(~PADDED, -10_000.0)
    heads = measured(site(4, SOFTMAX), self=masked, dim=-1).heads
    assert max(head.bound for head in heads) == pytest.approx(float(masked.max()))


def test_the_bound_holds_with_a_bias_and_is_the_product_of_the_longest_rows() -> None:
    q, k = qk(key_heads=2)
    plain = measured(site(4), query=q, key=k)
    longest = q.norm(dim=-1).amax((0, 2)) * k.norm(dim=-1).amax((0, 2)).repeat_interleave(2) / math.sqrt(8)
    assert [head.bound for head in plain.heads] == pytest.approx(longest.tolist())
    biased = measured(site(4), query=q, key=k, attn_mask=100 * BIAS)
    assert all(head.bound >= head.sampled_max for head in biased.heads)
    most = (100 * BIAS).amax((0, 2, 3))
    assert [head.bound for head in biased.heads] == pytest.approx((longest + most).tolist())


def test_a_bias_below_0_everywhere_does_not_raise_the_bound() -> None:
    q, k = qk()
    slopes = -30.0 * (torch.arange(10)[:, None] - torch.arange(10)).abs()
    plain, biased = measured(site(4), query=q, key=k), measured(site(4), query=q, key=k, attn_mask=slopes)
    assert [head.bound for head in biased.heads] == [head.bound for head in plain.heads]


@pytest.mark.parametrize("low", [-100.0, -1e4, -1e9, torch.finfo(torch.float32).min])
def test_a_mask_hides_however_low_it_is(low: float) -> None:
    q, k = qk()
    logits, mask = q @ k.mT / math.sqrt(8), torch.zeros(10, 10).masked_fill(~CAUSAL, low)
    assert_heads(measured(site(4), query=q, key=k, attn_mask=mask), logits.masked_fill(~CAUSAL, -math.inf))
    assert_heads(measured(site(4, SOFTMAX), self=logits + mask, dim=-1), logits.masked_fill(~CAUSAL, -math.inf))


def test_logits_that_are_far_apart_by_themselves_are_not_hidden() -> None:
    q, k = qk()
    assert_heads(measured(site(4, SOFTMAX), self=20 * q @ k.mT, dim=-1), 20 * q @ k.mT)
    low = q @ k.mT - 300
    assert_heads(measured(site(4, SOFTMAX), self=low, dim=-1), low)


def test_a_sample_is_seeded_and_holds_at_most_64_rows() -> None:
    q, k = qk(rows=300, keys=300)
    first, again, other = (measured(site(4), seed, query=q, key=k, is_causal=True) for seed in (0, 0, 1))
    assert first == again
    assert first != other
    assert first.rows == 128
    assert not first.basis.exact
    rows = one_of_each(300, seed=0)
    seen = torch.arange(300) <= rows[:, None]
    assert_heads(first, (q[:, :, rows] @ k.mT / math.sqrt(8)).masked_fill(~seen, -math.inf))


@pytest.mark.parametrize("count", [65, 300, 512])
def test_a_sample_holds_one_row_of_each_stretch(count: int) -> None:
    samples = [one_of_each(count, seed) for seed in range(60)]
    for rows in samples:
        assert len(rows.unique()) == 64
        assert abs(float(rows.double().mean()) - (count - 1) / 2) < count / 64, "no part of the sequence has more"
    assert torch.cat(samples).unique().tolist() == list(range(count))


def test_a_sample_of_the_logits_of_a_softmax_is_that_of_q_and_k() -> None:
    q, k = qk(rows=300, keys=300)
    product = measured(site(4), query=q, key=k, scale=1.0)
    softmax = measured(site(4, SOFTMAX), self=q @ k.mT, dim=-1)
    assert softmax.rows == product.rows == 128
    for a, b in zip(product.heads, softmax.heads, strict=True):
        assert (a.sampled_max, a.std, a.entropy) == pytest.approx((b.sampled_max, b.std, b.entropy), rel=1e-5)


def test_64_rows_are_all_looked_at() -> None:
    q, k = qk(rows=64, keys=70)
    measure = measured(site(4), query=q, key=k)
    assert measure.basis.exact
    assert_heads(measure, q @ k.mT / math.sqrt(8))


class Largest(TorchDispatchMode):
    """Keeps the number of elements of the largest tensor that an operation allocates, and of operations."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = self.calls = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        self.calls += 1
        if isinstance(output, Tensor) and not func.is_view:
            self.elements = max(self.elements, output.numel())
        return output


@pytest.mark.parametrize("kind", ["product", "biased", "logits"])
def test_no_square_of_the_sequence_is_allocated(kind: str) -> None:
    tokens, heads = 1024, 4
    q, k = qk(batch=1, heads=heads, key_heads=heads, rows=tokens, keys=tokens)
    arguments: dict[str, Any] = {"query": q, "key": k, "is_causal": kind == "product"}
    where = site(heads)
    if kind == "biased":
        arguments["attn_mask"] = torch.zeros(1, 1, tokens, tokens)
    if kind == "logits":
        where, arguments = site(heads, SOFTMAX), {"self": q @ k.mT, "dim": 3}
    with Largest() as mode:
        measured(where, **arguments)
    assert 0 < mode.elements <= heads * 64 * tokens


def test_heads_are_taken_in_groups_that_bound_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    q, k = qk(key_heads=2, rows=40, keys=40)
    bias = torch.randn(4, 40, 40)
    whole = measured(site(4), query=q, key=k, attn_mask=bias)
    monkeypatch.setattr("normprobe.measures.logit_operands.PIECE", 2 * 2 * 40 * 40)
    with Largest() as mode:
        parts = measured(site(4), query=q, key=k, attn_mask=bias)
    assert parts == whole
    assert mode.elements == 2 * 2 * 40 * 40, "logits of the two query heads of one key head, for two samples"
    monkeypatch.setattr("normprobe.measures.logit_operands.PIECE", 2 * 2 * 7 * 40)  # seven rows of these in one go
    rows = measured(site(4), query=q, key=k, attn_mask=bias)
    for found, expected in zip(rows.heads, whole.heads, strict=True):
        numbers = (one.model_dump(exclude={"margins"}, exclude_none=True) for one in (found, expected))
        assert next(numbers) == pytest.approx(next(numbers), rel=1e-5)
        assert found.margins == expected.margins


def test_exact_takes_every_row() -> None:
    q, k = qk(rows=200, keys=200)
    sampled, every = (LogitHandler(site(4), seed=0, exact=exact) for exact in (False, True))
    for handler in (sampled, every):
        handler.before({"query": q, "key": k, "is_causal": False})
    assert sampled.measure is not None
    assert every.measure is not None
    assert not sampled.measure.basis.exact
    assert every.measure.basis.exact
    assert every.measure.rows == 2 * 200
    logits = (q.double() @ k.double().repeat_interleave(q.shape[1] // k.shape[1], 1).mT) * q.shape[-1] ** -0.5
    assert [h.sampled_max for h in every.measure.heads] == pytest.approx(logits.amax((0, 2, 3)).tolist(), rel=1e-5)
    below = zip(sampled.measure.heads, every.measure.heads, strict=True)
    assert all(some.sampled_max <= all_.sampled_max <= all_.bound for some, all_ in below)
    assert {m for head in every.measure.heads for m in head.margins.model_dump(exclude_none=True).values()} == {0.0}


@pytest.mark.parametrize(("rows", "exact"), [(64, True), (65, False)])
def test_margins_are_0_where_every_row_fits_into_the_sample(rows: int, exact: bool) -> None:
    q, k = qk(rows=rows, keys=rows)
    found = measured(site(4), query=q, key=k, is_causal=True)
    assert found.basis.exact is exact
    margins = [m for head in found.heads for m in head.margins.model_dump(exclude_none=True).values()]
    assert len(margins) == 4 * 4
    assert all((margin == 0) is exact for margin in margins)


def test_what_all_rows_tell_lies_within_the_margins_of_a_sample() -> None:
    """99 % intervals: of 4 · 120 numbers of heads of all kinds, flat and sharp, 468 at least; P < 1e-3."""
    generator = torch.Generator().manual_seed(0)
    inside, widths = [], []
    for seed in range(10):
        q, k = (torch.randn(1, 12, 600, 8, generator=generator) for _ in range(2))
        q = q * torch.linspace(0.1, 12, 12)[:, None, None] * torch.rand(1, 12, 600, 1, generator=generator)
        some, every = (LogitHandler(site(12), seed=seed, exact=exact) for exact in (False, True))
        for handler in (some, every):
            handler.before({"query": q, "key": k, "is_causal": True})
        assert some.measure is not None
        assert every.measure is not None
        for sampled, exact in zip(some.measure.heads, every.measure.heads, strict=True):
            for name, margin in sampled.margins.model_dump(exclude_none=True).items():
                inside.append(abs(getattr(sampled, name) - getattr(exact, name)) <= margin)
            widths.append(sampled.margins.entropy)
    assert len(inside) == 480
    assert sum(inside) >= 468
    assert max(widths) < 0.15


@pytest.mark.parametrize(
    ("where", "arguments", "message"),
    [
        (site(4, SOFTMAX), {"self": torch.zeros(2, 4, 10, 10), "dim": 2}, "softmax over axis 2 of 4"),
        (site(4, SOFTMAX), {"self": torch.zeros(3, 10, 10), "dim": 2}, "expected four axes with 4 heads"),
        (site(4), {"query": torch.zeros(10, 8), "key": torch.zeros(10, 8)}, "expected four axes"),
        (
            site(4, OpSite(path="a", op="aten._flash_attention_forward.default")),
            {"query": torch.zeros(2, 10, 4, 8)},
            "layout of q and k in aten._flash_attention_forward.default",
        ),
    ],
)
def test_what_is_not_understood_raises(where: AttentionSite, arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        measured(where, **arguments)


@pytest.mark.parametrize("build", [gpt2, llama, t5, bert, neox])
def test_the_fused_kernel_and_the_written_out_attention_give_equal_numbers(build: Callable[..., Case]) -> None:
    results = []
    for attention in ("sdpa", "eager"):
        case = build(attention=attention)
        anatomy = anatomy_of(case.model, case.inputs)
        found, skipped = measure_forward(case.model, case.inputs, anatomy)
        assert skipped == ()
        assert {s.site.op.startswith("scaled") for s in anatomy.attention} == {attention == "sdpa"}
        results.append(found.attention)
    fused, eager = results
    assert len(fused) == len(eager) >= 3
    for one, other in zip(fused, eager, strict=True):
        assert (one.path, one.rows, len(one.heads)) == (other.path, other.rows, len(other.heads))
        for a, b in zip(one.heads, other.heads, strict=True):
            for name in ("sampled_max", "uncapped_max", "std", "entropy", "saturated", "first_token"):
                assert getattr(a, name) == pytest.approx(getattr(b, name), rel=1e-3, abs=1e-5), (one.path, name)
            assert b.sampled_max <= b.bound + 1e-6
            assert b.bound <= a.bound * (1 + 1e-5)


def test_the_function_below_multi_head_attention_is_measured() -> None:
    layer = nn.TransformerEncoderLayer(32, 4, 48, batch_first=True)
    model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).eval()
    x = torch.randn(2, 10, 32)
    anatomy = anatomy_of(model, x)
    assert {s.site.op for s in anatomy.attention} == {"scaled_dot_product_attention"}
    found, skipped = measure_forward(model, x, anatomy)
    assert skipped == ()
    attention = model.layers[0].self_attn
    with torch.no_grad():
        q, k, _ = F.linear(x, attention.in_proj_weight, attention.in_proj_bias).chunk(3, -1)
    q, k = (t.unflatten(-1, (4, 8)).transpose(1, 2) for t in (q, k))
    assert_heads(found.attention[0], q @ k.mT / math.sqrt(8))


def test_a_nan_query_shows_in_its_head_alone() -> None:
    q, k = qk()
    q[0, 2, 5, 1] = math.nan
    heads = measured(site(4), query=q, key=k).heads
    assert [math.isnan(h.sampled_max) for h in heads] == [False, False, True, False]
    assert [math.isnan(h.bound) for h in heads] == [False, False, True, False]


def test_sites_that_were_sampled_in_another_share_are_told_apart() -> None:
    given = [dict(zip(("query", "key"), qk(rows=rows, keys=300), strict=True)) for rows in (100, 250)]
    alone = [measured(site(4), **each) for each in given]
    together = Together(tell, alike)
    handlers = [LogitHandler(site(4), 0, together=together) for _ in given]
    for handler, each in zip(handlers, given, strict=True):
        handler.before(each)
    assert [handler.measure for handler in handlers] == alone
    assert alone[0].heads[0].margins.std < alone[1].heads[0].margins.std


def test_a_sample_is_on_the_cpu_whatever_the_default_device_is() -> None:
    sampled_rows.cache_clear()
    with torch.device("meta"):
        found = sampled_rows(300, 0), sampled_rows(10, 0)
    assert [rows.device.type for rows in found] == ["cpu", "cpu"]
    assert torch.equal(sampled_rows(300, 0), one_of_each(300, 0))
