"""Gains and offsets folded into readers: the same function, unit gains, and what is refused."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from normprobe.errors import RewriteError
from normprobe.rewrites import FoldGains, Plan, Survey, make_plan
from normprobe.rewrites.edits import PART, set_values
from tests import models
from tests.rewrites.cases import double, outputs, snapshot

BUILDS = {
    "gpt2": models.gpt2,
    "llama": lambda: models.llama(tie_word_embeddings=False),
    "t5": models.t5,
    "bloom": models.bloom,
    "neox": lambda: models.neox(True),
    "torch": lambda: models.torch_encoder(True, True),
}


def plan_of(model: nn.Module, inputs: Any, **settings: Any) -> Plan:
    return make_plan(model, [FoldGains(**settings)], inputs)


@pytest.mark.parametrize("name", BUILDS)
def test_the_function_stays_and_the_gains_are_one(name: str) -> None:
    model, inputs = double(BUILDS[name]())
    before, kept = outputs(model, inputs), snapshot(model)
    plan = plan_of(model, inputs).apply()
    assert float((outputs(model, inputs) - before).abs().max() / before.abs().max()) <= 1e-13
    folded = {site.path for site in plan.steps[0][1].sites}
    assert len(folded) >= 4
    for norm in Survey.of(model, inputs).anatomy.norms:
        if norm.path in folded and norm.weight is not None:
            unit = 0.0 if norm.affine.startswith("one_plus") else 1.0
            assert bool((model.get_parameter(norm.weight) == unit).all())
    plan.undo()
    assert snapshot(model) == kept


def test_the_weights_are_those_of_the_formula() -> None:
    model, inputs = double(models.gpt2())
    block = model.transformer.h[0]
    gain, offset = block.ln_1.weight.detach().clone(), block.ln_1.bias.detach().clone()
    weight, bias = block.attn.c_attn.weight.detach().clone(), block.attn.c_attn.bias.detach().clone()
    plan_of(model, inputs, only="transformer.h.0.ln_1", expect=1).apply()
    assert torch.allclose(block.attn.c_attn.weight, gain[:, None] * weight, atol=1e-15)
    assert torch.allclose(block.attn.c_attn.bias, bias + offset @ weight, atol=1e-14)
    assert not bool(block.ln_1.bias.any())


def test_one_plus_w_becomes_zero() -> None:
    model, inputs = models.gemma2()
    plan = plan_of(model, inputs).apply()
    assert plan.proof is not None
    assert plan.proof.max_rel <= 1e-6
    assert not bool(model.model.layers[0].input_layernorm.weight.any())


def test_what_else_reads_is_the_reason_to_refuse() -> None:
    model, inputs = models.gpt2()
    (found,) = (found for _, found in plan_of(model, inputs).steps)
    assert {each.path: each.why for each in found.refused} == {
        "transformer.ln_f": "transformer.wte.weight reads something else too"
    }
    neox, ids = models.neox(False)
    (found,) = (found for _, found in plan_of(neox, ids).steps)
    assert "has nowhere to go" in next(each.why for each in found.refused if each.path.endswith("final_layer_norm"))
    post, x = models.torch_encoder(False, False)
    with pytest.raises(RewriteError, match="reads it too"):
        plan_of(post, x).apply()


class Shared(nn.Module):
    """Two norms with one gain, and one weight that reads both."""

    def __init__(self, one_gain: bool) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(8) for _ in range(2))
        self.reads = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))
        if one_gain:
            self.norms[1].weight = self.norms[0].weight
        else:
            self.reads[1] = self.reads[0]

    def forward(self, x: Tensor) -> Tensor:
        for norm, read in zip(self.norms, self.reads, strict=True):
            x = x + read(norm(x))
        return x


@pytest.mark.parametrize(
    ("one_gain", "why"), [(True, "norms.0.weight is used in norms.1 too"), (False, "reads something else too")]
)
def test_what_is_shared_is_refused(one_gain: bool, why: str) -> None:
    model = models.shuffled(Shared(one_gain))
    kept = snapshot(model)
    with pytest.raises(RewriteError, match=why):
        plan_of(model, torch.randn(3, 4, 8)).apply()
    assert snapshot(model) == kept


def test_gains_of_each_head_are_refused_by_their_shape() -> None:
    model, inputs = models.hugging_face("CohereForCausalLM", "CohereConfig", **models.SMALL, use_qk_norm=True)
    (found,) = (found for _, found in plan_of(model, inputs).steps)
    why = {each.path: each.why for each in found.refused}
    name = "model.layers.0.self_attn.q_norm"
    assert why[name] == f"{name}.weight: shape (features,) expected, found (4, 8)"


@pytest.mark.parametrize("name", ["Mixtral", "GptOss"])  # matrices of [outputs, inputs], and the other way round
def test_experts_are_readers_too(name: str) -> None:
    built = models.hugging_face(
        f"{name}ForCausalLM",
        f"{name}Config",
        **models.SMALL,
        num_key_value_heads=2,
        num_local_experts=4,
        num_experts_per_tok=2,
    )
    model, inputs = built  # in float32, as its grouped product wants it
    before = outputs(model, inputs)
    plan = plan_of(model, inputs).apply()
    assert float((outputs(model, inputs) - before).abs().max() / before.abs().max()) <= 1e-5
    touched = {name for site in plan.steps[0][1].sites for name in site.touched}
    assert any(model.get_parameter(name).dim() == 3 for name in touched)
    assert any("gate" in name for name in touched)


def test_an_offset_left_out_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """What holds these tests up: without the offsets the function is another one."""
    model, inputs = models.gpt2()
    biases = {id(p) for name, p in model.named_parameters() if name.endswith("c_attn.bias")}

    def all_but(parameter: Tensor, values: Tensor, undo: ExitStack) -> None:
        if id(parameter) not in biases:
            set_values(parameter, values, undo)

    monkeypatch.setattr("normprobe.rewrites.norms.fold.set_values", all_but)
    kept = snapshot(model)
    with pytest.raises(RewriteError, match="could not prove FoldGains"):
        plan_of(model, inputs).apply()
    assert snapshot(model) == kept


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_large_weight_is_scaled_as_a_whole_one_would_be(dtype: torch.dtype) -> None:
    """It is scaled a few rows at a time, the output features in either axis."""

    class Turned(nn.Module):
        def __init__(self, features: int, width: int) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(width, features))  # inputs in rows

        def forward(self, x: Tensor) -> Tensor:
            return x @ self.weight

    torch.manual_seed(5)
    width = PART // 64 + 3
    for last in (nn.Linear(width, 200, bias=False), Turned(200, width), nn.Linear(width, 1, bias=False)):
        model = nn.Sequential(nn.RMSNorm(width), last).to(dtype)
        with torch.no_grad():
            model[0].weight.copy_(1 + torch.rand(width))
        wide, gain = last.weight.detach().double(), model[0].weight.detach().double()
        expected = (wide * (gain[:, None] if isinstance(last, Turned) else gain)).to(dtype)
        plan_of(model, torch.randn(3, width).to(dtype)).apply()
        assert torch.equal(last.weight.detach(), expected)
