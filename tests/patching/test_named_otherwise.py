"""Files may name weights otherwise than the model does, or lack some: patched classes are loaded all the same."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, GPTNeoXConfig, GPTNeoXForCausalLM

import normprobe
from normprobe.patching.options import PatchOptions
from normprobe.patching.run import patch
from normprobe.rewrites import AddQKNorm, MuP, Rewrite, ScaleResidual
from normprobe.targets.quiet import quiet
from tests.patching.checkpoints import SIZES, llama, logits, made, mixtral, saved


def names(folder: Path) -> set[str]:
    return {name for path in folder.glob("*.safetensors") for name in load_file(path)}


def patched(model: Any, folder: Path, *rewrites: Rewrite) -> Path:
    return patch(str(saved(model, folder / "source")), folder / "out", rewrites, PatchOptions(level=None)).out


def gpt_neox() -> Any:
    return made(GPTNeoXForCausalLM, GPTNeoXConfig(**SIZES, num_attention_heads=4, max_position_embeddings=32))


def test_what_files_name_otherwise_is_found_and_saved_so(tmp_path: Path) -> None:
    """The head of a GPT-NeoX by the name of its class, the experts of a Mixtral by that of its architecture."""
    for number, model in enumerate((gpt_neox(), mixtral())):
        out = patched(model, tmp_path / f"{number}", AddQKNorm(start="calibrated"))
        with quiet():
            loaded, code = normprobe.load(out), AutoModelForCausalLM.from_pretrained(out, trust_remote_code=True)
            code.save_pretrained(out.parent / "again")
        assert torch.equal(logits(code), logits(loaded))
        assert names(tmp_path / f"{number}" / "source") < names(out) == names(out.parent / "again")
        assert torch.equal(logits(normprobe.load(out.parent / "again")), logits(loaded))


def test_factors_that_no_file_holds_are_there(tmp_path: Path) -> None:
    out = patched(llama(), tmp_path, MuP(base_width=16, base_head_dim=4))
    with quiet():
        models = normprobe.load(out), AutoModelForCausalLM.from_pretrained(out, trust_remote_code=True)
    factors = [b for model in models for name, b in model.named_buffers() if name.endswith("_mup_queries")]
    assert len(factors) == 4
    assert all(torch.allclose(each, torch.tensor(0.5**0.5)) for each in factors)


def test_what_was_added_and_is_in_no_file_begins_with_its_number(tmp_path: Path) -> None:
    """Memory of weights that no file holds has any values."""
    out = patched(llama(), tmp_path, AddQKNorm(), ScaleResidual(value=0.5))
    model, held = normprobe.load(out), load_file(tmp_path / "source" / "model.safetensors")
    with quiet():
        fresh = type(model).from_pretrained(None, config=model.config, state_dict=dict(held))
    added = [tensor for name, tensor in fresh.state_dict().items() if name not in held]
    assert {value for tensor in added for value in tensor.flatten().tolist()} == {1.0, 0.5}
    assert all(torch.equal(tensor, held[name]) for name, tensor in fresh.state_dict().items() if name in held)


def test_a_configuration_builds_models_with_several_heads(tmp_path: Path) -> None:
    out = patched(llama(), tmp_path, AddQKNorm(), MuP(base_width=16))
    config = AutoConfig.from_pretrained(out)
    before = copy.deepcopy(config.to_dict())
    kinds = (AutoModel, AutoModelForCausalLM)
    below, whole = (kind.from_config(config, trust_remote_code=True) for kind in kinds)
    assert config.to_dict() == before
    assert below.layers[0].self_attn.q_proj.q_norm.weight.shape == (4, 8)
    assert "its input times base width / width" in str(whole.lm_head)
