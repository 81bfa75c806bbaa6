"""Checkpoints whose model is code that comes with them: values are patched, what needs more code is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from normprobe.errors import CheckpointError, TargetError
from normprobe.patching.options import PatchOptions
from normprobe.patching.run import patch
from normprobe.rewrites import AddQKNorm, FoldGains, SetEps
from normprobe.targets import TargetOptions
from tests.patching.checkpoints import IDS, llama, saved

_CODE = """from transformers import LlamaConfig, LlamaForCausalLM
class MineConfig(LlamaConfig):
    model_type = "mine"
class Mine(LlamaForCausalLM):
    config_class = MineConfig
"""
TRUSTED = PatchOptions(level=None, target=TargetOptions(trust_remote_code=True))


@pytest.fixture
def source(tmp_path: Path) -> Path:
    folder = saved(llama(), tmp_path / "source")
    config = json.loads((folder / "config.json").read_text())
    config |= {"model_type": "mine", "architectures": ["Mine"]}
    config["auto_map"] = {"AutoConfig": "mine.MineConfig", "AutoModelForCausalLM": "mine.Mine"}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "mine.py").write_text(_CODE)
    return folder


def test_values_and_stated_numbers_are_patched(source: Path, tmp_path: Path) -> None:
    found = patch(str(source), tmp_path / "out", [FoldGains(), SetEps(1e-4)], TRUSTED)
    assert (found.manifest.loads, "trust_remote_code=True" in found.loading) == ("plain", True)
    assert json.loads((found.out / "config.json").read_text())["rms_norm_eps"] == 1e-4
    made = AutoModelForCausalLM.from_pretrained(found.out, trust_remote_code=True)
    had = AutoModelForCausalLM.from_pretrained(source, trust_remote_code=True, rms_norm_eps=1e-4)
    assert type(made).__name__ == "Mine"
    assert bool((made.model.layers[0].input_layernorm.weight == 1).all())
    torch.testing.assert_close(made(IDS).logits, had(IDS).logits, rtol=1e-4, atol=1e-4)


def test_what_needs_code_or_trust_is_refused(source: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="the patch needs code, and the model is Python code"):
        patch(str(source), tmp_path / "out", [AddQKNorm()], TRUSTED)
    with pytest.raises(TargetError, match="--trust-remote-code runs that code"):
        patch(str(source), tmp_path / "out", [FoldGains()])
    assert [path.name for path in tmp_path.iterdir()] == ["source"]
