"""`normprobe.load` says by file what a folder lacks, before transformers reads it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import normprobe
from normprobe.errors import CheckpointError, TargetError
from tests.patching.checkpoints import logits

Source = Callable[[str], Path]


def halved(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def pickled(folder: Path) -> None:
    path = folder / "model.safetensors"
    torch.save(load_file(path), folder / "pytorch_model.bin")
    path.unlink()


def without(name: str) -> Callable[[Path], None]:
    def changed(folder: Path) -> None:
        weights = load_file(folder / "model.safetensors")
        del weights[name]
        save_file(weights, folder / "model.safetensors", {"format": "pt"})

    return changed


def reshaped(folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    weights["model.norm.weight"] = torch.ones(3)
    save_file(weights, folder / "model.safetensors", {"format": "pt"})


def adapter(folder: Path) -> None:
    (folder / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": "mine/base"}))


BROKEN = {
    "halved": (lambda folder: halved(folder / "model.safetensors"), r"model\.safetensors: cannot.*\n.*\n.*truncated"),
    "none": (lambda folder: (folder / "model.safetensors").unlink(), "no weights\n.*model.safetensors.*\n.*LICENSE"),
    "pickles": (pickled, r"pickled weights are refused\n.*\n.*pytorch_model\.bin, .*\n.*use_safetensors=False"),
    "adapter": (adapter, r"is an adapter\n.*\n.*of mine/base\n.*PeftModel\.from_pretrained\(normprobe\.load"),
    "configuration": (lambda folder: (folder / "config.json").unlink(), r"no config\.json\n.*\n.*model\.safetensors"),
    "tensor": (
        without("model.norm.weight"),
        r"lacks 1 tensor of a LlamaForCausalLM\n.*\n.*none for model\.norm\.weight",
    ),
    "shape": (reshaped, r"model\.norm\.weight has another shape\n.*\(32,\), by config\.json\n.*\(3,\)"),
    "json": (lambda folder: (folder / "config.json").write_text("{"), r"config\.json: no valid JSON"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_what_a_folder_lacks_is_said(source: Source, case: str) -> None:
    folder, (broken, said) = source("llama"), BROKEN[case]
    normprobe.load(folder)
    broken(folder)
    with pytest.raises(CheckpointError, match=said):
        normprobe.load(folder)


@pytest.mark.filterwarnings("ignore:.*torch_dtype")
def test_options_are_those_of_transformers(source: Source) -> None:
    folder = source("llama")
    assert normprobe.load(folder, torch_dtype=torch.bfloat16).dtype is torch.bfloat16
    model, told = normprobe.load(folder, output_loading_info=True)
    assert (model.dtype, told["missing_keys"]) == (torch.float32, set())
    reshaped(folder)
    assert normprobe.load(folder, ignore_mismatched_sizes=True).model.norm.weight.shape == (32,)


def test_a_shard_that_is_missing_or_broken_is_named(source: Source) -> None:
    folder = source("llama-sharded")
    last = max(folder.glob("*.safetensors"))
    last.write_bytes(b"\0" * 100)
    with pytest.raises(CheckpointError, match=f"{last.name}: cannot be read as safetensors\n.*\n.*corrupt header"):
        normprobe.load(folder)
    last.unlink()
    with pytest.raises(CheckpointError, match=f"shard {last.name} is missing\n.*\n.*5 tensors"):
        normprobe.load(folder)


def test_an_unknown_model_type_is_named(source: Source) -> None:
    folder = source("llama")
    (folder / "config.json").write_text('{"model_type": "gpt99"}')
    with pytest.raises(TargetError, match="unknown model type 'gpt99'"):
        normprobe.load(folder)


def test_pickles_that_are_asked_for_are_read(source: Source) -> None:
    folder = source("llama")
    wanted = logits(normprobe.load(folder))
    pickled(folder)
    assert torch.equal(logits(normprobe.load(folder, use_safetensors=False)), wanted)


def test_no_folder_is_said(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"is no folder\n.*\n.*nothing at"):
        normprobe.load(tmp_path / "none")
