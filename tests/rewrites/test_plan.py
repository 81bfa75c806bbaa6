"""All or nothing, undo bit for bit, counting, conflicts, proof, serialisation."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from normprobe.errors import RewriteError
from normprobe.rewrites import (
    ALL,
    AddFinalNorm,
    AddOutputNorms,
    Effect,
    Fixup,
    Initialise,
    MuP,
    Rewrite,
    ScaleResidual,
    StoreGains,
    ToDyT,
    ToRMSNorm,
    UpcastNorms,
    load,
    make_plan,
)
from tests.models import decoder, gpt2, llama, to_meta, torch_encoder
from tests.rewrites.cases import Scaled, narrow_decoder, snapshot

NORMS = ("blocks.0.mix.norm", "blocks.1.mix.norm")


def test_planning_changes_nothing_and_says_everything() -> None:
    model, inputs = narrow_decoder(final=False)
    before = snapshot(model)
    text = str(make_plan(model, [UpcastNorms(), AddFinalNorm()], inputs))
    assert snapshot(model) == before
    for part in (
        "planned",
        "breaking",
        "4 sites, 0 refused",
        "adds head.final_norm.weight",
        "an optimiser made before",
    ):
        assert part in text


def test_two_rewrites_compose_and_undo_is_bit_for_bit() -> None:
    model, inputs = narrow_decoder(final=False)
    before = snapshot(model)
    plan = make_plan(model, [UpcastNorms(), AddFinalNorm()], inputs).apply()
    assert snapshot(model) != before
    plan.undo()
    assert snapshot(model) == before
    assert plan.apply().state == "applied"
    plan.undo()
    assert snapshot(model) == before


def test_plans_are_undone_in_any_order() -> None:
    model, inputs = narrow_decoder(final=False)
    before = snapshot(model)
    first = make_plan(model, [UpcastNorms()], inputs).apply()
    second = make_plan(model, [AddFinalNorm()], inputs).apply()
    first.undo()
    second.undo()
    assert snapshot(model) == before


@pytest.mark.parametrize("fail_at", NORMS)
def test_a_failure_halfway_leaves_the_model_as_it_was(fail_at: str) -> None:
    model, inputs = narrow_decoder()
    before = snapshot(model)
    faulty = Scaled(factor=2.0, paths=NORMS, fail_at=fail_at)
    plan = make_plan(model, [AddFinalNormless(), faulty], inputs)
    with pytest.raises(RewriteError, match=f"Scaled failed at {fail_at}, site .* of 3; the model is as it was"):
        plan.apply()
    assert snapshot(model) == before
    assert plan.state == "planned"


class AddFinalNormless(UpcastNorms):
    """Upcasts the final norm alone."""

    def sites(self, survey: Any) -> Any:
        found = super().sites(survey)
        return dataclasses.replace(found, sites=tuple(s for s in found.sites if s.path == "final"))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_an_error_of_one_per_cent_is_caught_and_taken_back(dtype: torch.dtype) -> None:
    model, inputs = decoder("pre")
    before = snapshot(model.to(dtype))
    with pytest.raises(RewriteError, match=r"could not prove Scaled(.|\n)*max \|Δ\| <= "):
        make_plan(model, [Scaled(factor=1.01, paths=("blocks.0.mix.branch.out",))], inputs).apply()
    assert snapshot(model) == before
    proof = make_plan(model, [Scaled(factor=1.0, paths=("head",))], inputs).apply().proof
    assert proof is not None
    assert (proof.max_abs, proof.kl, proof.agreement, proof.holds) == (0.0, 0.0, 1.0, True)


def test_a_layer_that_does_not_take_hold_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    model, inputs = narrow_decoder()
    before = snapshot(model)
    plan = make_plan(model, [UpcastNorms()], inputs)
    monkeypatch.setattr("normprobe.rewrites.norms.upcast._HALF", ())
    with pytest.raises(RewriteError, match=r"did not take hold(.|\n)*a rmsnorm that reduces in input"):
        plan.apply()
    assert snapshot(model) == before


def test_the_proof_has_the_closed_form_of_a_uniform_change() -> None:
    """Logits of a linear head scaled by 2: max |Δ| is the largest logit, and KL follows from both softmaxes."""
    model, inputs = decoder("pre")
    logits = model(inputs).detach().double()

    class Doubled(Scaled):
        effect = Effect.BREAKING

    proof = make_plan(model, [Doubled(factor=2.0, paths=("head",))], inputs).apply().proof
    assert proof is not None
    assert proof.max_rel == pytest.approx(1.0)
    assert proof.max_abs == pytest.approx(float(logits.abs().max()))
    p, q = logits.softmax(-1), (2 * logits).softmax(-1)
    assert proof.kl == pytest.approx(float((p * (p / q).log()).sum(-1).mean()), rel=1e-4)
    assert (proof.agreement, proof.tokens, proof.holds) == (1.0, inputs.numel(), None)
    wanted = [F.cross_entropy(z[:, :-1].flatten(0, 1), inputs[:, 1:].flatten()) for z in (logits, 2 * logits)]
    assert proof.loss == "cross-entropy of the next token"
    assert [proof.loss_before, proof.loss_after] == pytest.approx([float(each) for each in wanted], rel=1e-5)
    assert f"loss {wanted[0]:.4g} -> {wanted[1]:.4g} (cross-entropy of the next token)" in str(proof)


def test_the_loss_of_a_proof_is_the_model_s_own_where_labels_are_given_and_none_without_tokens() -> None:
    model, inputs = llama()
    labels = inputs["input_ids"].flip(1)
    proof = make_plan(model, [ScaleResidual("constant", 0.5, preserve=False)], {**inputs, "labels": labels})
    before = float(model(**inputs, labels=labels).loss.detach())
    found = proof.apply().proof
    assert found is not None
    assert (found.loss, found.loss_before) == ("the model's own", pytest.approx(before, rel=1e-6))
    assert found.loss_after == pytest.approx(float(model(**inputs, labels=labels).loss.detach()), rel=1e-6)
    encoder, x = torch_encoder(True, True)
    bare = make_plan(encoder, [ScaleResidual("constant", 0.5, preserve=False)], x).apply().proof
    assert bare is not None
    assert (bare.loss, bare.loss_before, bare.loss_after) == (None, None, None)


def test_an_original_that_is_not_finite_has_no_tolerance() -> None:
    model, inputs = narrow_decoder()
    model.head.weight.data[0, 0] = float("nan")
    proof = make_plan(model, [UpcastNorms()], inputs).apply().proof
    assert proof is not None
    assert proof.holds is None
    assert "not finite" in proof.tolerance_source


def test_misuse_is_refused() -> None:
    model, inputs = narrow_decoder()
    with pytest.raises(RewriteError, match="no rewrite was given"):
        make_plan(model, [], inputs)
    with pytest.raises(RewriteError, match=r"two rewrites of one plan would change (.|\n)*UpcastNorms, UpcastNorms"):
        make_plan(model, [UpcastNorms(), UpcastNorms()], inputs)
    plan = make_plan(model, [UpcastNorms()], inputs)
    with pytest.raises(RewriteError, match="nothing to undo: the plan is planned"):
        plan.undo()
    with pytest.raises(RewriteError, match="applied already"):
        plan.apply().apply()


def test_a_model_on_meta_is_rewritten_without_proof() -> None:
    model, inputs = narrow_decoder(final=False)
    plan = make_plan(model.to("meta"), [AddFinalNorm()], inputs.to("meta")).apply()
    assert plan.proof is None
    assert model.head.final_norm.weight.is_meta


@pytest.mark.parametrize("rewrite", [UpcastNorms(expect=3), AddFinalNorm(kind="rmsnorm", eps=1e-5)])
def test_rewrites_are_frozen_and_travel_as_json(rewrite: Rewrite) -> None:
    assert load(json.loads(json.dumps(rewrite.to_dict()))) == rewrite
    assert "\n" not in rewrite.describe()
    assert type(rewrite) in ALL
    with pytest.raises(dataclasses.FrozenInstanceError, match="cannot assign"):
        rewrite.expect = 4  # type: ignore[misc]


def test_unknown_rewrites_and_settings_are_refused() -> None:
    with pytest.raises(RewriteError, match=r"unknown rewrite\n  expected: UpcastNorms \| SetEps"):
        load({"rewrite": "Nothing"})
    with pytest.raises(RewriteError, match="unknown setting of UpcastNorms"):
        load({"rewrite": "UpcastNorms", "speed": 3})


def test_a_hugging_face_model_keeps_its_abilities() -> None:
    model, inputs = llama()
    model.model.norm = nn.Identity()
    make_plan(model, [AddFinalNorm()], inputs).apply()
    made = model.generate(inputs["input_ids"], max_new_tokens=3, do_sample=False)
    assert made.shape[1] == inputs["input_ids"].shape[1] + 3
    model.train()
    enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    enable()
    model(**inputs, labels=inputs["input_ids"]).loss.backward()
    assert model.lm_head.final_norm.weight.grad is not None


def test_torchs_fused_encoder_path_does_not_pass_a_rewrite_by() -> None:
    """In eval mode without gradients torch would compute the layer from its weights and call no module of it."""
    model, x = torch_encoder(True, True)
    with torch.no_grad():
        before = model(x)
    plan = make_plan(model, [ScaleResidual("constant", 0.5, preserve=False)], x)
    assert "torch's fused path of layers.0, layers.1 is off" in str(plan)
    plan.apply()
    with torch.no_grad():
        plain = model(x)
        assert torch.backends.mha.get_fastpath_enabled()
        torch.backends.mha.set_fastpath_enabled(False)
        try:
            wanted = model(x)
        finally:
            torch.backends.mha.set_fastpath_enabled(True)
        assert torch.allclose(plain, wanted, atol=1e-5)
        assert not torch.allclose(plain, before, atol=1e-3)
        plan.undo()
        assert torch.equal(model(x), before)


NEEDS_WEIGHTS = [ToRMSNorm(), ScaleResidual(), StoreGains("one_plus_weight"), ToDyT(), Fixup(), Initialise(), MuP(16)]
NEEDS_WEIGHTS.append(AddOutputNorms(start="calibrated"))


@pytest.mark.parametrize("rewrite", NEEDS_WEIGHTS, ids=lambda each: each.name)
def test_what_reads_weights_is_refused_without_any(rewrite: Rewrite) -> None:
    model, inputs = gpt2()
    model = to_meta(model)
    before = {name: type(module) for name, module in model.named_modules()}
    plan = make_plan(model, [rewrite], inputs)
    with pytest.raises(RewriteError, match=rf"(?s){rewrite.name} has to read the weights.*on the meta device.*empty"):
        plan.apply()
    assert {name: type(module) for name, module in model.named_modules()} == before
