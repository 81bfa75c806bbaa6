"""Weights that the model holds in more bits than its files, as transformers does for routers and some projections."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    LlamaForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
)

import normprobe
from normprobe.errors import RewriteError
from normprobe.patching.options import PatchOptions
from normprobe.patching.run import patch
from normprobe.rewrites import FoldGains, Initialise, Rewrite
from normprobe.targets.options import TargetOptions
from tests.patching.checkpoints import llama

FAST = PatchOptions(level=None, target=TargetOptions(tokens=32))


def deepseek() -> Any:
    """Its router is float32 in memory, whatever it is stored in."""
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "kv_lora_rank": 16, "q_lora_rank": 16}
    parts = {"qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8, "first_k_dense_replace": 1}
    experts = {"moe_intermediate_size": 16, "n_routed_experts": 8, "num_experts_per_tok": 2, "n_group": 2}
    config = DeepseekV3Config(**sizes, **heads, **parts, **experts, topk_group=1)
    return DeepseekV3ForCausalLM(config).to(torch.bfloat16)


def t5() -> Any:
    """The last projection of its MLPs is float32 in memory where the rest is float16."""
    config = T5Config(vocab_size=64, d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4)
    return T5ForConditionalGeneration(config).half()


MODELS = {"deepseek": deepseek, "t5": t5, "llama": llama}


@pytest.fixture
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """One of the models with gains that are not 1; the Llama's queries are stored in bfloat16, all else in float32."""
    model = MODELS[request.param]()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.mul_(1 + 0.3 * torch.randn_like(parameter))
    model.save_pretrained(tmp_path / "in")
    if request.param == "llama":
        path = tmp_path / "in" / "model.safetensors"
        narrow = {k: v.bfloat16() if "q_proj" in k else v for k, v in load_file(path).items()}
        save_file(narrow, path, {"format": "pt"})
    return tmp_path / "in"


@pytest.mark.parametrize(
    ("folder", "rewrites"),
    [
        ("deepseek", [FoldGains()]),
        ("deepseek", [FoldGains(), Initialise("gpt2")]),
        ("t5", [Initialise("gpt2")]),
        ("llama", [Initialise("gpt2")]),
    ],
    indirect=["folder"],
    ids=["fold", "fold, then draw", "half", "one narrow"],
)
def test_what_is_proven_is_what_files_hold(folder: Path, rewrites: list[Rewrite]) -> None:
    out = folder.with_name("out")
    proof = patch(str(folder), out, rewrites, FAST).manifest.proof
    assert proof is not None
    assert proof.holds is not False
    before, after = (load_file(each / "model.safetensors") for each in (folder, out))
    assert {name: tensor.dtype for name, tensor in after.items()} == {k: v.dtype for k, v in before.items()}
    assert any(not torch.equal(after[name], before[name]) for name in before)
    normprobe.load(out)


@pytest.mark.parametrize("folder", ["llama"], indirect=True)
def test_what_files_cannot_hold_exactly_is_not_called_exact(folder: Path) -> None:
    told = (
        r"could not prove FoldGains(.|\n)*the files hold 2 changed weights, .*\.0\.self_attn\.q_proj\.weight the .*32"
    )
    with pytest.raises(RewriteError, match=told):
        patch(str(folder), folder.with_name("out"), [FoldGains()], FAST)
    wide = folder.with_name("wide")
    LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32).save_pretrained(wide)
    assert patch(str(wide), folder.with_name("out"), [FoldGains()], FAST).manifest.proof is not None


@pytest.mark.parametrize("folder", ["llama"], indirect=True)
def test_what_is_refused_for_something_else_has_no_such_hint(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*found: object) -> None:
        raise RewriteError("for a test")

    monkeypatch.setattr(FoldGains, "confirm", refused)
    with pytest.raises(RewriteError, match="for a test") as raised:
        patch(str(folder), folder.with_name("out"), [FoldGains()], FAST)
    assert "files hold" not in str(raised.value)


@pytest.mark.parametrize("folder", ["deepseek"], indirect=True)
def test_a_few_wide_weights_do_not_widen_the_copy(folder: Path) -> None:
    proof = patch(str(folder), folder.with_name("out"), [FoldGains()], FAST).manifest.proof
    assert proof is not None
    assert proof.holds
    assert "a float32 copy" in proof.tolerance_source
