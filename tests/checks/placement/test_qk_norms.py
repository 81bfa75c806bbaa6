"""NP209 and NP210: norms on queries and keys."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from normprobe.records import HeadRows, QKNorm
from tests import models
from tests.checks import builders as b
from tests.checks.placement.planted import anatomy, codes, found, judge, replace

HEADS, SIZE = models.HEADS, models.WIDTH // models.HEADS
WAYS = {  # of norming queries shaped (batch, tokens, width), and the axis that it is
    "head": "head",
    "full": "full",
    "wide gain": "head",
    "across heads": "heads",
    "features first": "heads",
    "tokens": "tokens",
    "heads and tokens": "tokens",
    "before the split": "tokens",
}


def unit(x: Tensor, *axes: int) -> Tensor:
    return x * (x.pow(2).mean(axes, keepdim=True) + 1e-6).rsqrt()


class Normed(nn.Module):
    """Attention that norms queries and keys in a way of its own."""

    def __init__(self, way: str, q: bool = True, k: bool = True, shared: bool = False) -> None:
        super().__init__()
        self.way, self.q, self.k, self.shared = way, q, k, shared
        self.qkv = nn.ModuleList(nn.Linear(models.WIDTH, models.WIDTH) for _ in range(3))
        self.out = nn.Linear(models.WIDTH, models.WIDTH)
        self.weight = nn.Parameter(torch.rand(HEADS, SIZE))

    def split(self, x: Tensor) -> Tensor:
        return x.view(*x.shape[:2], HEADS, SIZE).transpose(1, 2)

    def normed(self, x: Tensor) -> Tensor:
        if self.way == "full":
            return self.split(F.layer_norm(x, (models.WIDTH,)))
        if self.way == "before the split":
            return self.split(unit(x, 1))
        if self.way == "features first":
            x = unit(x.view(*x.shape[:2], SIZE, HEADS), -1)
            return x.transpose(-1, -2).transpose(1, 2)
        x = self.split(x)
        if self.way == "head":
            return F.layer_norm(x, (SIZE,))
        if self.way == "wide gain":
            return unit(x, -1) * self.weight[:, None]
        return unit(x, *{"across heads": (1,), "tokens": (2,), "heads and tokens": (1, 2)}[self.way])

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (layer(x) for layer in self.qkv)
        k = q if self.shared else k
        q = self.normed(q) if self.q else self.split(q)
        k = self.normed(k) if self.k else self.split(k)
        y = F.scaled_dot_product_attention(q, k, self.split(v))
        return self.out(y.transpose(1, 2).reshape(x.shape))


def model(*args: Any, **options: Any) -> models.Built:
    whole, inputs = models.decoder("pre")
    torch.manual_seed(0)
    for i in range(3):
        replace(whole, f"blocks.{i}.mix.branch", Normed(*args, **options))
    return whole.eval(), inputs


@pytest.mark.parametrize("way", WAYS)
def test_np210_knows_what_a_statistic_is_taken_of(way: str) -> None:
    built = model(way)
    axes = {site.qk_norm.axis for site in anatomy(*built).attention if site.qk_norm is not None}
    assert axes == {WAYS[way]}
    finding = found("NP210", *built)
    assert [f.value for f in finding] == ([] if WAYS[way] in ("head", "full") else [WAYS[way]])
    if finding:
        assert (finding[0].severity.value, len(finding[0].places)) == ("error", 3)
        assert codes(*built) == {"NP210"}


@pytest.mark.parametrize(("name", "axis"), [("qwen3", "head"), ("olmo2", "full"), ("gemma2", None), ("llama", None)])
def test_np209_and_np210_are_silent_on_sound_models(name: str, axis: str | None) -> None:
    model, inputs = models.MODELS[name]()
    assert {site.qk_norm and site.qk_norm.axis for site in anatomy(model, inputs).attention} == {axis}
    assert codes(model, inputs) == set()


@pytest.mark.parametrize(("name", "lost"), [("qwen3", "query"), ("qwen3", "key"), ("olmo2", "query"), ("olmo2", "key")])
def test_np209_finds_the_operand_that_lost_its_norm(name: str, lost: str) -> None:
    whole, inputs = models.MODELS[name]()
    for site in anatomy(whole, inputs).attention:
        assert site.qk_norm is not None
        path = getattr(site.qk_norm, lost)
        replace(whole, path, nn.Identity())
    (finding,) = found("NP209", whole, inputs)
    has, lacks = ("keys", "queries") if lost == "query" else ("queries", "keys")
    assert finding.message.startswith(f"{has} are normed before q·kᵀ and {lacks} are not")
    assert (finding.severity.value, len(finding.places)) == ("warning", models.LAYERS)
    assert codes(whole, inputs) == {"NP209"}


@pytest.mark.parametrize("side", ["q", "k"])
def test_np209_finds_one_of_two_by_hand(side: str) -> None:
    assert len(found("NP209", *model("head", **{side: False}))) == 1


def test_np209_leaves_keys_alone_that_are_queries_of_unit_length() -> None:
    assert found("NP209", *model("head", q=False, shared=True)) == ()


LOPSIDED = QKNorm(kind="rmsnorm", axis="head", query="blocks.0.attn.q_norm")
ROWS = {name: HeadRows(parameter=f"{name}.weight", heads=(((0, 4),), ((4, 8),))) for name in ("q", "k")}


def test_np209_says_that_it_could_not_follow_the_other_operand() -> None:
    assert len(judge("NP209", b.document(attention=(b.site(qk_norm=LOPSIDED, columns=ROWS),)))[0]) == 1
    finding, (skipped,) = judge("NP209", b.document(attention=(b.site(qk_norm=LOPSIDED, columns={"q": ROWS["q"]}),)))
    assert finding == ()
    assert skipped.why == "one operand is normed; the other could not be followed to its projection"


def test_np209_asks_for_a_softmax() -> None:
    indexer = b.site(qk_norm=LOPSIDED, columns=ROWS, kernel="aten.relu")
    assert judge("NP209", b.document(attention=(indexer,))) == ((), ())


def test_np210_says_that_the_axis_is_not_known() -> None:
    norm = LOPSIDED.model_copy(update={"axis": "unknown"})
    finding, (skipped,) = judge("NP210", b.document(attention=(b.site(qk_norm=norm),)))
    assert finding == ()
    assert skipped.what == "NP210 qk-norm-wrong-axis at blocks.0.attn"
