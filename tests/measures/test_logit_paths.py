"""Attention logits on every path that they take, with padding, sinks and soft caps, against float64 by hand.

Dims: B batch, H heads, Q query rows, T keys, D head width.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from normprobe.measures.attention import LogitHandler
from normprobe.measures.forward import measure_forward
from normprobe.records import AttentionMeasure, AttentionSite, HeadLogits, OpSite
from tests.measures.models import anatomy_of
from tests.measures.test_attention import Largest

B, H, T, D, WIDTH = 2, 4, 9, 8, 32
SDPA = OpSite(path="a", op="scaled_dot_product_attention")
FLEX = OpSite(path="a", op="flex_attention")
SOFTMAX = OpSite(path="a", op="aten._softmax.default")
CAUSAL = torch.ones(T, T, dtype=torch.bool).tril()


def drawn(heads: int = H, seed: int = 3) -> Tensor:
    return 2 * torch.randn(B, heads, T, D, generator=torch.Generator().manual_seed(seed))


def site(where: OpSite, **fields: Any) -> AttentionSite:
    return AttentionSite(path="a", heads=H, kv_heads=H, head_dim=D, site=where, **fields)


def measured(handler: LogitHandler, **arguments: Any) -> AttentionMeasure:
    handler.before(arguments)
    assert handler.measure is not None
    return handler.measure


def rows_of(logits_BHQT: Tensor, head: int, padding_BQ: Tensor | None = None) -> list[Tensor]:
    """The logits of every row that counts, −∞ where masked, with the first key that counts in front."""
    found = []
    for sample in range(B):
        kept = torch.ones(T, dtype=torch.bool) if padding_BQ is None else ~padding_BQ[sample]
        found += [row[kept] for row in logits_BHQT[sample, head, kept].double()]
    return found


def assert_rows(
    head: HeadLogits, rows: list[Tensor], cap: float | None = None, products: list[Tensor] | None = None
) -> None:
    """The definitions of `HeadLogits`, a row at a time; `rows` hold the logits before a soft cap, `products` those
    without a bias."""
    capped = [row if cap is None else (cap * (row / cap).tanh()).where(row.isfinite(), row) for row in rows]
    seen = torch.cat([row[row > -math.inf] for row in capped])
    many = [row.softmax(-1) for row in capped if int((row > -math.inf).sum()) > 1]
    ratios = [float(-(p * p.clamp_min(1e-300).log()).sum() / math.log(int((p > 0).sum()))) for p in many]
    assert head.sampled_max == pytest.approx(float(seen.max()), rel=1e-5)
    assert head.std == pytest.approx(float(seen.std(correction=0)), rel=1e-5)
    assert head.entropy == pytest.approx(sum(ratios) / len(ratios), rel=1e-5)
    assert head.first_token == pytest.approx(sum(float(row.softmax(-1)[0]) for row in capped) / len(capped), rel=1e-5)
    assert head.uncapped_max == pytest.approx(float(torch.cat(products or rows).max()), rel=1e-5)


def rms(x_BNHD: Tensor) -> float:
    return float(x_BNHD.double().square().mean().sqrt())


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("where", [SDPA, SOFTMAX])
def test_padding_has_no_part_and_the_first_key_is_the_first_that_counts(where: OpSite, side: str) -> None:
    q, k, padding = drawn(), drawn(seed=4), torch.zeros(B, T, dtype=torch.bool)
    padding[1, : 4 if side == "left" else None] = True
    padding[1, : 0 if side == "left" else 5] = side == "left"
    mask = CAUSAL & ~padding[:, None, None]
    mask = mask | (torch.eye(T, dtype=torch.bool) & padding[:, None, :, None])  # a padded query sees itself
    q[padding[:, None].expand(B, H, T)] *= 10
    k[padding[:, None].expand(B, H, T)] *= 10
    logits = (q @ k.mT / math.sqrt(D)).masked_fill(~mask, -math.inf)
    handler = LogitHandler(site(where), 0, [padding])
    given = {"query": q, "key": k, "attn_mask": mask} if where is SDPA else {"self": logits, "dim": -1}
    measure = measured(handler, **given)
    assert measure.rows == measure.basis.count == int((~padding).sum())
    for index, head in enumerate(measure.heads):
        assert_rows(head, rows_of(logits, index, padding))
        counted = (~padding)[..., None].expand(B, T, D)
        longest = [float(x[:, index][~padding].norm(dim=-1).max()) for x in (q, k)]
        if where is SDPA:
            assert head.q_rms == pytest.approx(rms(q[:, index][counted]), rel=1e-5)
            assert head.k_rms == pytest.approx(rms(k[:, index][counted]), rel=1e-5)
            assert head.bound == pytest.approx(longest[0] * longest[1] / math.sqrt(D), rel=1e-5)
        else:
            assert head.bound == pytest.approx(head.sampled_max, rel=1e-5)


@pytest.mark.parametrize("in_front", [False, True])
@pytest.mark.parametrize("size", [1.0, 300.0])
def test_a_sink_takes_a_share_and_is_no_key(in_front: bool, size: float) -> None:
    logits, sinks = drawn() @ drawn(seed=4).mT, size * torch.rand(B, H, T, 2)
    parts = (sinks, logits) if in_front else (logits, sinks)
    columns = (0, 2) if in_front else (T, T + 2)
    handler = LogitHandler(site(SOFTMAX, sinks=True, sink_columns=columns), 0)
    weights = torch.cat((logits, sinks), -1).double().softmax(-1)
    for index, head in enumerate(measured(handler, self=torch.cat(parts, -1), dim=-1).heads):
        assert head.sampled_max == head.bound == pytest.approx(float(logits[:, index].max()), rel=1e-6)
        assert head.std == pytest.approx(float(logits[:, index].double().std(correction=0)), rel=1e-5)
        own = logits[:, index].double().softmax(-1)
        assert head.entropy == pytest.approx(float(-(own * own.log()).sum(-1).mean() / math.log(T)), rel=1e-5)
        assert head.sink == pytest.approx(float(weights[:, index, :, T:].sum(-1).mean()), rel=1e-5)
        assert head.first_token == pytest.approx(float(weights[:, index, :, 0].mean()), rel=1e-5, abs=1e-30)
        share = float((weights[:, index, :, :T].amax(-1) > 0.99).double().mean())
        assert head.saturated == pytest.approx(share)
        assert head.margins.sink == 0.0


class Written(nn.Module):
    """Causal attention written out, with a soft cap and a sink of one logit a head."""

    def __init__(self, cap: float | None = None, sink: bool = False) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(1)
        self.qkv, self.out, self.cap = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH), cap
        self.sink = nn.Parameter(torch.randn(H, generator=generator)) if sink else None
        with torch.no_grad():
            self.qkv.weight.copy_(0.6 * torch.randn(3 * WIDTH, WIDTH, generator=generator))

    def operands(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = self.qkv(x).unflatten(-1, (3, H, D)).permute(2, 0, 3, 1, 4)
        return q, k, v

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.operands(x)
        logits = q @ k.mT * D**-0.5
        if self.cap is not None:
            logits = self.cap * torch.tanh(logits / self.cap)
        logits = logits.masked_fill(~CAUSAL, -math.inf)
        if self.sink is not None:
            logits = torch.cat((logits, self.sink.view(1, H, 1, 1).expand(*logits.shape[:3], 1)), -1)
        weights = logits.softmax(-1)[..., :T]
        return x + self.out((weights @ v).transpose(1, 2).flatten(-2))


X = torch.randn(B, T, WIDTH, generator=torch.Generator().manual_seed(2))


def heads_of(model: nn.Module) -> tuple[HeadLogits, ...]:
    found, skipped = measure_forward(model, X, anatomy_of(model, X))
    assert skipped == ()
    return found.attention[0].heads


@pytest.mark.parametrize("cap", [None, 3.0])
def test_written_attention_shows_its_queries_and_what_a_cap_hides(cap: float | None) -> None:
    model = Written(cap).eval()
    with torch.no_grad():
        q, k, _ = model.operands(X)
    logits = (q @ k.mT / math.sqrt(D)).masked_fill(~CAUSAL, -math.inf)
    for index, head in enumerate(heads_of(model)):
        assert_rows(head, rows_of(logits, index), cap)
        assert head.q_rms == pytest.approx(rms(q[:, index]), rel=1e-5)
        assert head.k_rms == pytest.approx(rms(k[:, index]), rel=1e-5)


def test_the_share_of_a_sink_is_found_in_the_data_flow() -> None:
    model = Written(sink=True).eval()
    assert model.sink is not None
    with torch.no_grad():
        q, k, _ = model.operands(X)
        logits = (q @ k.mT / math.sqrt(D)).masked_fill(~CAUSAL, -math.inf)
        sinks = model.sink.view(1, H, 1, 1).expand(B, H, T, 1)
        weights = torch.cat((logits, sinks), -1).double().softmax(-1)
    for index, head in enumerate(heads_of(model)):
        assert head.sink == pytest.approx(float(weights[:, index, :, -1].mean()), rel=1e-5)
        assert head.q_rms == pytest.approx(rms(q[:, index]), rel=1e-5)


class Turned(Written):
    """The heads come after the batch in the product and before it in the softmax."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.operands(x)
        logits = torch.bmm(q.transpose(0, 1).flatten(0, 1), k.transpose(0, 1).flatten(0, 1).mT) * D**-0.5
        weights = logits.unflatten(0, (H, B)).transpose(0, 1).softmax(-1)
        return x + self.out((weights @ v).transpose(1, 2).flatten(-2))


def test_heads_that_lie_elsewhere_in_the_product_are_not_told() -> None:
    assert {(head.q_rms, head.k_rms) for head in heads_of(Turned().eval())} == {(None, None)}


class Flex(Written):
    """Flexible attention with grouped heads, a slope for each head, and a soft cap."""

    def __init__(self, slope: float, cap: float | None) -> None:
        super().__init__(cap)
        self.slope = slope

    def operands(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = super().operands(x)
        return q, k[:, ::2], v[:, ::2]

    def score(self, s: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        s = s + self.slope * (h + 1) * (j - i)
        return s if self.cap is None else self.cap * torch.tanh(s / self.cap)

    def forward(self, x: Tensor) -> Tensor:
        seen = create_block_mask(lambda b, h, i, j: i >= j, None, None, T, T, device="cpu")
        q, k, v = self.operands(x)
        y = flex_attention(q, k, v, score_mod=self.score, block_mask=seen, enable_gqa=True)
        return x + self.out(y.transpose(1, 2).flatten(-2))


@pytest.mark.filterwarnings("ignore:flex_attention called without", "ignore::DeprecationWarning")
@pytest.mark.parametrize(("slope", "cap"), [(0.0, None), (0.3, None), (0.0, 3.0)])
def test_flexible_attention_is_measured_through_its_own_functions(slope: float, cap: float | None) -> None:
    model = Flex(slope, cap).eval()
    with torch.no_grad():
        q, k, _ = model.operands(X)
    k = k.repeat_interleave(2, 1)
    place = torch.arange(T)
    slopes = slope * torch.arange(1, H + 1)[:, None, None] * (place - place[:, None])
    products = (q @ k.mT / math.sqrt(D)).masked_fill(~CAUSAL, -math.inf)
    for index, head in enumerate(heads_of(model)):
        assert_rows(head, rows_of(products + slopes, index), cap, rows_of(products, index))
        assert head.bound == pytest.approx(head.sampled_max, rel=1e-6)
        assert head.q_rms == pytest.approx(rms(q[:, index]), rel=1e-5)
        assert head.k_rms == pytest.approx(rms(k[:, index]), rel=1e-5)


def flexible(tokens: int, score: Any) -> dict[str, Any]:
    """The arguments of a call with `H` query heads that share two key heads."""
    generator = torch.Generator().manual_seed(5)
    q, k = (2 * torch.randn(B, heads, tokens, D, generator=generator) for heads in (H, 2))
    seen = create_block_mask(lambda b, h, i, j: i >= j, None, None, tokens, tokens, device="cpu")
    return {"query": q, "key": k, "score_mod": score, "block_mask": seen.as_tuple(), "scale": D**-0.5}


def slope(s: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
    return s + 0.1 * (h + 1) * (j - i)


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("score", [slope, lambda s, b, h, i, j: s])
def test_logits_of_a_function_are_looked_at_in_pieces(monkeypatch: pytest.MonkeyPatch, exact: bool, score: Any) -> None:
    tokens = 200
    given = flexible(tokens, score)
    whole = measured(LogitHandler(site(FLEX), 0, exact=exact), **given)
    monkeypatch.setattr("normprobe.measures.flex.PIECE", 1)
    with Largest() as mode:
        parts = measured(LogitHandler(site(FLEX), 0, exact=exact), **given)
    assert mode.elements <= B * 2 * 64 * tokens, "64 rows of the query heads of one key head"
    for found, expected in zip(parts.heads, whole.heads, strict=True):
        numbers = (one.model_dump(exclude={"margins"}, exclude_none=True) for one in (found, expected))
        assert next(numbers) == pytest.approx(next(numbers), rel=1e-5)
    q, k = given["query"].double(), given["key"].double().repeat_interleave(2, 1)
    place, heads = torch.arange(tokens), torch.arange(H)[:, None, None]
    logits = score(q @ k.mT * D**-0.5, None, heads, place[:, None], place)
    logits = logits.masked_fill(place > place[:, None], -math.inf)
    for index, head in enumerate(parts.heads):
        top = float(logits[:, index].max())
        if score is slope or exact:
            assert head.bound == pytest.approx(top, rel=1e-5)
        else:
            longest = q[:, index].norm(dim=-1).max() * k[:, index].norm(dim=-1).max() * D**-0.5
            assert head.bound == pytest.approx(float(longest), rel=1e-5)
        if exact:
            assert head.sampled_max == pytest.approx(top, rel=1e-5)


def test_logits_that_the_function_keeps_are_not_all_computed_for_their_bound() -> None:
    with Largest() as mode:
        measured(LogitHandler(site(FLEX), 0), **flexible(200, lambda s, b, h, i, j: s))
    kept = mode.calls
    with Largest() as mode:  # as many operations on the sampled rows, and those on all
        measured(LogitHandler(site(FLEX), 0), **flexible(200, slope))
    assert kept < mode.calls
