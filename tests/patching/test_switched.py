"""A switch of the configuration that adds what a rewrite added, if that computes the same."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    CohereConfig,
    CohereForCausalLM,
    OPTConfig,
    OPTForCausalLM,
    PhiConfig,
    PhiForCausalLM,
)

import normprobe
from normprobe.patching.alike.outputs import compared
from normprobe.patching.options import PatchOptions
from normprobe.patching.run import Patched, patch
from normprobe.rewrites import AddFinalNorm, AddQKNorm, Proof, Rewrite
from tests.patching.checkpoints import SIZES, config, in_memory, logits, made, saved, stored

PHI = {**SIZES, "num_attention_heads": 4, "max_position_embeddings": 32, "bos_token_id": 1, "eos_token_id": 2}
OPT = {**PHI, "ffn_dim": 48, "word_embed_proj_dim": 32, "_remove_final_layer_norm": True, "pad_token_id": 0}


LAYER_NORMS = AddQKNorm("layernorm", start="calibrated", shared=True, eps=1e-5)


def own(folder: Path, rewrite: Rewrite, model_type: str | None) -> Patched:
    return patch(str(folder), folder.parent / "out", [rewrite], PatchOptions(level=None, as_type=model_type))


def phi(folder: Path) -> Path:
    return saved(made(PhiForCausalLM, PhiConfig(**PHI)), folder / "source")


def test_a_switch_of_the_configuration_adds_the_final_norm(tmp_path: Path) -> None:
    folder = saved(made(OPTForCausalLM, OPTConfig(**OPT)), tmp_path / "source")
    found = own(folder, AddFinalNorm(), None)
    assert (found.manifest.loads, found.manifest.became) == ("plain", None)
    assert config(found.out) == {**config(folder), "_remove_final_layer_norm": False}
    model = AutoModelForCausalLM.from_pretrained(found.out)
    assert torch.equal(logits(model), logits(in_memory(folder, [AddFinalNorm()])))
    assert stored(found.out).keys() - stored(folder).keys() == {
        "model.decoder.final_layer_norm.weight",
        "model.decoder.final_layer_norm.bias",
    }


def test_outputs_that_are_the_same_by_given_choices_alone_are_not_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def given(*args: Any) -> Proof:
        return compared(*args).model_copy(update={"choices": 1, "choices_given": 1})

    monkeypatch.setattr("normprobe.patching.alike.model.compared", given)
    folder = saved(made(OPTForCausalLM, OPTConfig(**OPT)), tmp_path / "source")
    assert own(folder, AddFinalNorm(), None).manifest.loads == "code"


def test_a_switch_adds_norms_of_queries_and_keys_where_rounding_may_differ(tmp_path: Path) -> None:
    folder = phi(tmp_path)
    found = own(folder, LAYER_NORMS, "phi")
    assert found.manifest.loads == "plain"
    assert config(found.out)["qk_layernorm"] is True
    model = AutoModelForCausalLM.from_pretrained(found.out)
    torch.testing.assert_close(logits(model), logits(in_memory(folder, [LAYER_NORMS])), rtol=0, atol=1e-6)


def test_a_switch_that_gives_other_outputs_is_left_alone(tmp_path: Path) -> None:
    folder = phi(tmp_path)
    found = own(folder, AddQKNorm("rmsnorm", shared=True, eps=1e-5), None)
    assert found.manifest.loads == "code"
    assert config(found.out)["qk_layernorm"] is False


def test_where_rounding_differs_it_has_to_be_asked_for(tmp_path: Path) -> None:
    folder = phi(tmp_path)
    first = own(folder, LAYER_NORMS, None)
    assert first.manifest.loads == "code"
    assert config(first.out)["qk_layernorm"] is False
    second = patch(str(first.out), tmp_path / "second", [], PatchOptions(level=None, as_type="phi"))
    assert second.manifest.loads == "plain"
    assert config(second.out)["qk_layernorm"] is True
    assert not {"normprobe", "auto_map"} & config(second.out).keys()
    assert second.manifest.became is not None
    proof, model = second.manifest.became.proof, AutoModelForCausalLM.from_pretrained(second.out)
    off = float((logits(model) - logits(normprobe.load(first.out))).abs().max())
    assert 0 < off <= (proof.tolerance or 0)


def test_one_gain_for_each_head_is_the_norm_of_cohere(tmp_path: Path) -> None:
    sizes: dict[str, Any] = {**PHI, "num_key_value_heads": 2, "layer_norm_eps": 1e-5, "pad_token_id": 0}
    folder = saved(made(CohereForCausalLM, CohereConfig(**sizes)), tmp_path / "source")
    rewrite = AddQKNorm("layernorm", start="calibrated", eps=1e-5)
    found = own(folder, rewrite, None)
    assert config(found.out)["use_qk_norm"] is True
    model = AutoModelForCausalLM.from_pretrained(found.out)
    assert torch.equal(logits(model), logits(in_memory(folder, [rewrite])))
