"""NP113 beside gains that were folded into weights, and beside norms that were added."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoModelForCausalLM, FalconConfig, FalconForCausalLM, LlamaConfig, LlamaForCausalLM

import normprobe
from normprobe.checks import find, run
from normprobe.patching.options import PatchOptions
from normprobe.patching.run import patch
from normprobe.records import Elements, Finding, NormGain, Severity
from normprobe.rewrites import (
    AddOutputNorms,
    AddQKNorm,
    FoldGains,
    Rewrite,
    StoreGains,
    Survey,
    ToPostNorm,
    make_plan,
)
from normprobe.rewrites.norms.fold import foldable
from tests.checks import builders as b
from tests.models import SMALL, shuffled

STANDS = "lost in loading, or folded into the weights that follow"
IDS = torch.arange(16)[None] % 64


def gain(path: str, moved: bool, foldable: bool | None, offset: Elements | None = None) -> NormGain:
    held = b.moved(path) if moved else b.elements(path)
    return b.gain(path, held, offset).model_copy(update={"foldable": foldable})


def found(*gains: NormGain, roles: tuple[str, ...] = ()) -> list[tuple[str, Severity, bool]]:
    norms = tuple(b.norm(one.path, role=role) for one, role in zip(gains, roles or ("pre",) * len(gains), strict=True))
    every, skipped = run(b.document(norms=norms, norm_gains=gains, init=b.init(0.0)), [find("NP113")])
    assert skipped == ()
    return [(place, one.severity, STANDS in one.message) for one in every for place in one.every_place]


def test_gains_that_may_be_in_weights_are_a_note() -> None:
    assert found(gain("a", False, True), gain("b", True, False)) == [("a", Severity.NOTE, True)]


@pytest.mark.parametrize(
    "other",
    [
        gain("b", True, True),
        gain("b", False, True, b.moved("b.bias")),
        gain("b", True, True, b.elements("b.bias", 0.0)),
    ],
)
def test_where_another_gain_could_be_in_weights_and_is_not_they_were_lost(other: NormGain) -> None:
    places = found(gain("a", False, True), gain("c", True, False), other)
    assert places[0] == ("a", Severity.WARNING, False)


@pytest.mark.parametrize("known", [False, None])
def test_gains_that_no_weight_takes_were_lost(known: bool | None) -> None:
    assert found(gain("a", False, known), gain("b", True, False)) == [("a", Severity.WARNING, False)]


def test_norms_on_queries_and_keys_do_not_speak_for_the_others() -> None:
    roles = ("pre", "final", "query", "key")
    gains = [gain("a", False, True), gain("b", False, False), gain("c", True, False), gain("d", True, False)]
    notes = [("a", Severity.NOTE, True), ("b", Severity.NOTE, True)]
    assert found(*gains, roles=roles) == notes
    gains[3] = gain("d", False, False)
    assert found(*gains, roles=roles) == [("d", Severity.WARNING, False), *notes]


# ---- small models


def trained(tied: bool, seed: int = 1) -> nn.Module:
    """A Llama whose rows differ in size and whose gains have moved, as those of trained models."""
    torch.manual_seed(0)
    return moved(LlamaForCausalLM(LlamaConfig(**SMALL, num_key_value_heads=2, tie_word_embeddings=tied)), seed)


def moved(model: nn.Module, seed: int = 1) -> nn.Module:
    model = shuffled(model)
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        if parameter.dim() > 1:
            parameter.data.mul_((0.7 * torch.randn(parameter.shape[0], 1, generator=generator)).exp())
    return model


def lost(model: nn.Module) -> list[Finding]:
    return [one for one in normprobe.probe(model, IDS).findings if one.code == "NP113"]


@pytest.mark.parametrize("tied", [True, False])
def test_a_model_with_folded_gains_is_told_so(tied: bool) -> None:
    model = trained(tied)
    assert lost(model) == []
    normprobe.rewrite(model, FoldGains(), IDS)
    (one,) = lost(model)
    assert (one.severity, len(one.places)) == (Severity.NOTE, 4 if tied else 5)
    assert STANDS in one.message
    normprobe.rewrite(model, AddQKNorm(start="calibrated", only="model.layers.0.*"), IDS)
    (again,) = lost(model)
    assert (again.severity, again.places) == (one.severity, one.places)


def test_a_norm_that_was_added_to_one_layer_does_not_speak_for_the_others() -> None:
    model = trained(tied=True)
    for parameter in (p for p in model.parameters() if p.dim() == 1):  # gains
        parameter.data.fill_(1.0)
    normprobe.rewrite(model, AddQKNorm(start="calibrated", only="model.layers.0.*"), IDS)
    (one,) = lost(model)
    assert (one.severity, len(one.places)) == (Severity.NOTE, 5)
    assert "every gain is 1 and every offset 0, but on queries and keys" in one.message


def test_keys_that_are_lost_from_a_trained_model_are_a_warning() -> None:
    model: Any = trained(tied=True)
    model.model.layers[1].input_layernorm.weight.data.fill_(1.0)
    (one,) = lost(model)
    assert (one.severity, one.where) == (Severity.WARNING, "model.layers.1.input_layernorm")
    assert "the gains of 4 other norms have moved" in one.message


@pytest.mark.parametrize("rewrite", [AddQKNorm(), AddOutputNorms()], ids=lambda rewrite: rewrite.name)
def test_norms_that_a_rewrite_added_were_not_lost(rewrite: Rewrite, tmp_path: Path) -> None:
    """Their gains begin at 1, as lost ones do: those of the same class that nobody is known to have added are lost."""
    model: Any = trained(tied=True)
    model.save_pretrained(tmp_path / "source")
    normprobe.rewrite(model, rewrite, IDS)
    assert lost(model) == []
    found = patch(str(tmp_path / "source"), tmp_path / "out", [rewrite], PatchOptions(level="forward"))
    assert found.after is not None
    assert "NP113" not in {one.code for one in found.after.findings}
    assert lost(normprobe.load(found.out)) == []
    unknown = copy.deepcopy(model)
    assert {one.severity for one in lost(unknown)} == {Severity.WARNING}


def test_gains_of_added_norms_that_were_several_numbers_can_be_lost(tmp_path: Path) -> None:
    trained(tied=True).save_pretrained(tmp_path / "source")
    rewrites = [AddQKNorm(start="calibrated")]
    found = patch(str(tmp_path / "source"), tmp_path / "out", rewrites, PatchOptions(level=None))
    weights = load_file(found.out / "model.safetensors")
    name = "model.layers.1.self_attn.q_proj.q_norm.weight"
    assert len(weights[name].unique()) > 1
    del weights[name]
    save_file(weights, found.out / "model.safetensors", {"format": "pt"})
    model = AutoModelForCausalLM.from_pretrained(found.out, trust_remote_code=True).eval()
    assert "model.layers.1.self_attn.q_proj.q_norm" in {place for one in lost(model) for place in one.every_place}


def test_a_norm_that_was_moved_is_none_that_was_added() -> None:
    model: Any = trained(tied=False)
    model.model.layers[1].input_layernorm.weight.data.fill_(1.0)
    plan = make_plan(model, [ToPostNorm()], {"input_ids": IDS}).apply()
    assert [one.severity for one in lost(model)] == [Severity.WARNING]
    plan.undo()
    assert [one.severity for one in lost(model)] == [Severity.WARNING]


def test_an_added_norm_that_is_stored_otherwise_since_is_still_one() -> None:
    model = trained(tied=True)
    normprobe.rewrite(model, [AddQKNorm(), StoreGains("one_plus_weight")], IDS)
    assert lost(model) == []


def without_biases() -> Any:
    torch.manual_seed(0)
    sizes = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    return moved(FalconForCausalLM(FalconConfig(**sizes, bias=False, parallel_attn=True)))


def test_where_no_offset_moved_gains_may_be_folded_without_a_bias() -> None:
    model = without_biases()
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            parameter.data.zero_()
    normprobe.rewrite(model, FoldGains(), IDS)
    assert {one.severity for one in lost(model)} == {Severity.NOTE}


def test_offsets_that_no_bias_could_take_tell_that_gains_were_lost() -> None:
    """The projections have no bias, and the other offsets have moved: this one has gone nowhere."""
    model = without_biases()
    assert lost(model) == []
    norm = model.transformer.h[1].input_layernorm
    norm.weight.data.fill_(1.0)
    norm.bias.data.zero_()
    found = [(one.severity, place) for one in lost(model) for place in one.every_place]
    assert set(found) == {(Severity.WARNING, "transformer.h.1.input_layernorm")}


def test_a_final_norm_that_is_lost_behind_a_tied_head_is_a_warning() -> None:
    """Its gain can have gone nowhere."""
    model: Any = trained(tied=True)
    normprobe.rewrite(model, FoldGains(only="*.post_attention_layernorm"), IDS)
    model.model.norm.weight.data.fill_(1.0)
    assert ("model.norm", Severity.WARNING) in [(p, f.severity) for f in lost(model) for p in f.every_place]


def test_what_can_be_folded_is_told_where_some_gains_stand_and_others_do_not() -> None:
    model: Any = trained(tied=True)
    assert foldable(Survey.of(model, {"input_ids": IDS})) is None
    model.model.layers[0].input_layernorm.weight.data.fill_(1.0)
    names = [f"model.layers.{i}.{name}_layernorm" for i in range(2) for name in ("input", "post_attention")]
    assert foldable(Survey.of(model, {"input_ids": IDS})) == set(names)
    gains = normprobe.probe(model, IDS).measurements.norm_gains
    assert {one.path: one.foldable for one in gains} == {**dict.fromkeys(names, True), "model.norm": False}
    assert foldable(Survey.of(model.to("meta"), {"input_ids": IDS.to("meta")})) is None
