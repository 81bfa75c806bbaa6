"""Clipped heads: their largest logit at the limit, all else bit for bit as it was."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import normprobe
from normprobe.errors import RewriteError
from normprobe.rewrites import AddQKNorm, QKClip, Rewrite, load, make_plan
from tests.rewrites.cases import snapshot

transformers = pytest.importorskip("transformers")
IDS = torch.arange(32).reshape(2, 16) * 3
SIZE = {"vocab_size": 128, "bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}
LAYERS = {"num_hidden_layers": 3, "hidden_size": 32, "num_attention_heads": 4}
KINDS: dict[str, dict[str, Any]] = {
    "GPT2": {"n_layer": 3, "n_embd": 32, "n_head": 4},
    "Llama": {**LAYERS, "intermediate_size": 48, "num_key_value_heads": 2},
    "GPTNeoX": {**LAYERS, "intermediate_size": 48},
    "Qwen2": {**LAYERS, "intermediate_size": 48, "num_key_value_heads": 2},
}


def built(kind: str) -> nn.Module:
    """A model whose heads have logits of 2 to 200."""
    torch.manual_seed(2)
    config = getattr(transformers, f"{kind}Config")(**SIZE, **KINDS[kind])
    model: nn.Module = transformers.AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(12).add_(0.02 * torch.randn_like(parameter)) if parameter.dim() > 1 else None
            parameter.add_(torch.randn_like(parameter)) if parameter.dim() == 1 else None
    return model


def largest(model: nn.Module, inputs: Any = None) -> dict[tuple[str, int], float]:
    report = normprobe.probe(model, {"input_ids": IDS} if inputs is None else inputs, exact=True)
    return {(site.path, head.head): head.sampled_max for site in report.attention for head in site.heads}


@pytest.mark.parametrize("kind", KINDS)
def test_heads_above_the_limit_come_down_to_it_and_no_other_row_moves(kind: str) -> None:
    model = built(kind)
    before, kept, held = largest(model), snapshot(model), {n: p.detach().clone() for n, p in model.named_parameters()}
    middle = len(before) // 2
    limit = sum(sorted(before.values())[middle - 1 : middle + 1]) / 2
    plan = make_plan(model, [QKClip(limit=limit)], {"input_ids": IDS}).apply()
    after = largest(model)
    over = {key for key, value in before.items() if value > limit}
    assert over
    assert all(value <= limit * 1.001 for value in after.values())
    moved = {name for name, p in model.named_parameters() if not torch.equal(p, held[name])}
    assert moved == {name for site in plan.steps[0][1].sites for name in site.touched}
    structure = normprobe.probe(model, {"input_ids": IDS}, level="structure").anatomy
    columns = {site.path: site.columns["q"] for site in structure.attention}
    for (path, head), value in after.items():
        weight, axis = columns[path].parameter, columns[path].axis
        rows = torch.tensor([row for start, stop in columns[path].heads[head] for row in range(start, stop)])
        new, old = (tensor.index_select(axis, rows) for tensor in (model.get_parameter(weight), held[weight]))
        assert torch.equal(new, old) != (value == pytest.approx(limit, rel=1e-4)), (path, head)
    plan.undo()
    assert snapshot(model) == kept


def test_the_factor_is_shared_by_queries_and_keys_of_a_head_of_its_own_alone() -> None:
    for kind, both in (("GPTNeoX", True), ("Llama", False)):
        model = built(kind)
        before = largest(model)
        top = max(before.values())
        touched = {
            name
            for site in make_plan(model, [QKClip(limit=0.9 * top)], {"input_ids": IDS}).steps[0][1].sites
            for name in site.touched
        }
        assert any("k_proj" in name for name in touched) is False
        assert any("query_key_value" in name or "q_proj" in name for name in touched)
        if both:
            assert {name.rpartition(".")[2] for name in touched} == {"weight", "bias"}


def test_planning_leaves_the_model_as_it_was() -> None:
    model = built("GPT2")
    kept = snapshot(model)
    plan = make_plan(model, [QKClip(limit=5.0)], {"input_ids": IDS})
    assert snapshot(model) == kept
    assert "rows times" in str(plan)


def test_where_nothing_exceeds_the_limit_it_says_so() -> None:
    with pytest.raises(RewriteError, match="QKClip would change nothing"):
        make_plan(built("GPT2"), [QKClip(limit=1e6)], {"input_ids": IDS}).apply()


def test_normed_and_biased_heads_are_refused() -> None:
    for kind, more, why in (
        ("Qwen3", {**LAYERS, "intermediate_size": 48, "head_dim": 8, "num_key_value_heads": 4}, "are normed"),
        ("Bloom", {"n_layer": 2, "hidden_size": 32, "n_head": 4}, "besides q·k"),
    ):
        torch.manual_seed(0)
        config = getattr(transformers, f"{kind}Config")(**SIZE, **more)
        model = transformers.AutoModelForCausalLM.from_config(config).eval()
        refused = make_plan(model, [QKClip(limit=0.01)], {"input_ids": IDS}).steps[0][1].refused
        assert refused
        assert all(why in each.why for each in refused)


@pytest.mark.parametrize("limit", [0.0, -1.0, float("nan"), float("inf")])
def test_a_limit_that_means_nothing_is_refused(limit: float) -> None:
    with pytest.raises(RewriteError, match="finite limit"):
        QKClip(limit=limit)
    assert load(QKClip(limit=30.0).to_dict()) == QKClip(limit=30.0)


@pytest.mark.parametrize(
    "pair", [(QKClip(limit=5.0), AddQKNorm()), (AddQKNorm(), QKClip(limit=5.0))], ids=["clip first", "norm first"]
)
def test_norms_beside_it_in_one_plan_are_refused_since_both_set_the_logits(pair: tuple[Rewrite, ...]) -> None:
    model = built("GPT2")
    before = snapshot(model)
    with pytest.raises(RewriteError, match=r"two rewrites of one plan would change logits of transformer\.h\.\d\.attn"):
        make_plan(model, pair, {"input_ids": IDS})
    assert snapshot(model) == before


def test_norms_on_an_attention_that_is_not_clipped_may_stand_beside_it() -> None:
    model = built("GPT2")
    with torch.no_grad():
        model.transformer.h[0].attn.c_attn.weight.mul_(1e-3)
    plan = make_plan(model, (QKClip(limit=5.0), AddQKNorm(only="transformer.h.0.attn")), {"input_ids": IDS})
    assert all(found.sites for _, found in plan.steps)
