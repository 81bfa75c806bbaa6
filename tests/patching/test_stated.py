"""A number that a rewrite changed goes into the fields of the configuration that state it, and into no others."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Gemma3Config, Gemma3ForConditionalGeneration

import normprobe
from normprobe.patching.options import PatchOptions
from normprobe.patching.run import patch
from normprobe.patching.same import same_outputs
from normprobe.rewrites import AddQKNorm, Rewrite, ScaleResidual, SetEps
from tests.patching.checkpoints import HEADS, SIZES, config, llama, logits, made, mixtral, saved
from tests.patching.training import ways

LENGTHS = {"max_position_embeddings": 64, "sliding_window": 16, "head_dim": 8}
IMAGES = {"image_size": 28, "patch_size": 14, "num_hidden_layers": 2, "num_attention_heads": 4}
MARKS = {"mm_tokens_per_image": 4, "image_token_index": 60, "boi_token_index": 61, "eoi_token_index": 62}


def told(model: Any, folder: Path, eps: float) -> tuple[dict[str, Any], dict[str, Any]]:
    """The configuration before and after."""
    source = saved(model, folder / "source")
    found = patch(str(source), folder / "out", [SetEps(eps)], PatchOptions(level=None))
    assert found.manifest.loads == "plain"
    return config(source), config(found.out)


def test_a_field_that_holds_the_same_number_by_chance_stays(tmp_path: Path) -> None:
    before, after = told(mixtral(rms_norm_eps=1e-3, router_aux_loss_coef=1e-3), tmp_path, 1e-5)
    assert after == {**before, "rms_norm_eps": 1e-5}


def test_the_eps_of_a_part_that_was_not_changed_stays(tmp_path: Path) -> None:
    """Text shows nothing of the tower that reads pictures."""
    text = {**SIZES, **HEADS, **LENGTHS, "rms_norm_eps": 1e-6}
    pictures = {"hidden_size": 32, "intermediate_size": 64, **IMAGES, "layer_norm_eps": 1e-6}
    sizes = Gemma3Config(text_config=text, vision_config=pictures, **MARKS)
    before, after = told(made(Gemma3ForConditionalGeneration, sizes), tmp_path, 1e-4)
    assert after["text_config"] == {**before["text_config"], "rms_norm_eps": 1e-4}
    assert after["vision_config"] == before["vision_config"]


CODE = [
    [SetEps(1e-3), AddQKNorm(kind="layernorm")],
    [AddQKNorm(), SetEps(1e-3)],
]


@pytest.mark.parametrize("rewrites", CODE, ids=str)
def test_an_eps_beside_what_needs_code_is_stated_too(rewrites: list[Rewrite], tmp_path: Path) -> None:
    source = saved(llama(rms_norm_eps=1e-6), tmp_path / "source")
    found = patch(str(source), tmp_path / "out", rewrites, PatchOptions(level="structure"))
    assert found.manifest.loads == "code"
    assert config(found.out)["rms_norm_eps"] == 1e-3
    assert found.after is not None
    assert "NP104" not in {finding.code for finding in found.after.findings}
    wanted, *others = (logits(way(found.out)) for way in ways().values())
    assert all(torch.equal(wanted, each) for each in others)


def test_an_eps_of_a_patched_checkpoint_is_stated_too(tmp_path: Path) -> None:
    source = saved(llama(rms_norm_eps=1e-6), tmp_path / "source")
    options = PatchOptions(level=None)
    first = patch(str(source), tmp_path / "first", [ScaleResidual()], options).out
    second = patch(str(first), tmp_path / "second", [SetEps(1e-3)], options).out
    assert (config(first)["rms_norm_eps"], config(second)["rms_norm_eps"]) == (1e-6, 1e-3)
    assert config(second)["normprobe"]["fields"] == [["rms_norm_eps"]]


@pytest.mark.parametrize("beside", [(), (AddQKNorm(kind="layernorm"),)])
def test_an_eps_of_some_norms_is_no_field(beside: tuple[Rewrite, ...], tmp_path: Path) -> None:
    """A field would give it to all."""
    source = saved(llama(rms_norm_eps=1e-6), tmp_path / "source")
    rewrites = [SetEps(1e-3, only=("model.layers.*",)), *beside]
    found = patch(str(source), tmp_path / "out", rewrites, PatchOptions(level=None))
    assert config(found.out)["rms_norm_eps"] == 1e-6
    assert normprobe.load(found.out).model.layers[0].input_layernorm.variance_epsilon == 1e-3


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ([1.0, float("nan")], [1.0, float("nan")], True),
        ([1.0, float("nan")], [1.0, 0.0], False),
        ([1.0, float("inf")], [1.0, torch.finfo(torch.float32).max], False),
        ([1.0, float("inf")], [1.0, float("inf")], True),
    ],
)
def test_outputs_are_the_same_where_all_numbers_are(one: list[float], other: list[float], same: bool) -> None:
    def model(values: list[float]) -> torch.nn.Module:
        made = torch.nn.Linear(2, 2, bias=False)
        made.weight.data = torch.tensor([values, [1.0, 1.0]])
        return made

    picked = torch.tensor([[0.0, 1.0]])
    assert same_outputs(model([0.0, one[1]]), model([0.0, other[1]]), (picked,)) is same
