"""A checkpoint that lacks weights, or has some twice or elsewhere, is refused; none is made up."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from normprobe.errors import CheckpointError
from normprobe.patching.options import PatchOptions
from normprobe.patching.run import patch
from normprobe.rewrites import Initialise
from normprobe.targets.options import TargetOptions
from tests.patching.checkpoints import contents
from tests.targets.test_gguf import write as write_gguf

Source = Callable[[str], Path]
PICKLES = PatchOptions(level=None, target=TargetOptions(allow_pickle=True))
LOST = "model.layers.1.mlp.down_proj.weight"


def refused(folder: Path, match: str) -> None:
    with pytest.raises(CheckpointError, match=match):
        patch(str(folder), folder.parent / "out", [Initialise(only="embeddings")], PICKLES)
    assert not (folder.parent / "out").exists()


def test_weights_that_are_missing_are_not_drawn_at_random(source: Source) -> None:
    folder = source("llama")
    tensors = load_file(folder / "model.safetensors")
    del tensors[LOST]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    refused(folder, f"(?s)lacks 1 tensor of a LlamaForCausalLM.*{LOST}.*architectures")


def test_a_gguf_file_without_all_weights_is_refused(tmp_path: Path) -> None:
    pytest.importorskip("gguf")
    folder = tmp_path / "source"
    folder.mkdir()
    write_gguf(folder / "tiny.gguf", without="blk.0.ffn_down.weight")
    with pytest.raises(CheckpointError, match="lacks 1 tensor of a LlamaForCausalLM"):
        patch(str(folder / "tiny.gguf"), tmp_path / "out", [Initialise(only="embeddings")], PICKLES)


def test_a_tensor_in_two_pickles_is_refused(source: Source) -> None:
    folder = source("llama")
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names = sorted(tensors)
    files = {"pytorch_model-00001-of-00002.bin": names[:10], "pytorch_model-00002-of-00002.bin": names[9:]}
    for file, held in files.items():
        torch.save({name: tensors[name] for name in held}, folder / file)
    places = {name: file for file, held in files.items() for name in held}
    (folder / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": places}))
    refused(folder, f"{names[9]} is in two shards")


def test_weights_in_folders_below_are_refused(source: Source) -> None:
    folder = source("llama-sharded-bf16")
    index = folder / "model.safetensors.index.json"
    places: dict[str, str] = json.loads(index.read_text())["weight_map"]
    for number, file in enumerate(sorted(set(places.values()))):
        (folder / f"{number}").mkdir()
        (folder / file).rename(folder / f"{number}" / "part.safetensors")
        places = {name: f"{number}/part.safetensors" if at == file else at for name, at in places.items()}
    index.write_text(json.dumps({"weight_map": places}))
    refused(folder, "weights in a folder below")


def test_a_folder_that_exists_is_refused_before_the_checkpoint_is_fetched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "out").mkdir()
    monkeypatch.setattr("normprobe.patching.source.whole_repository", lambda *args: pytest.fail("fetched"))
    with pytest.raises(CheckpointError, match="out exists"):
        patch("org/model", tmp_path / "out", [Initialise()], PICKLES)
    assert contents(tmp_path / "out") == {}


class Runs:
    """What makes a folder where its pickle is read."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.mkdir, (str(self.folder),)


def test_a_pickle_that_runs_code_is_refused_and_runs_none(source: Source) -> None:
    folder = source("llama")
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    torch.save({**tensors, "more": Runs(folder / "ran")}, folder / "pytorch_model.bin")
    refused(folder, r"pytorch_model.bin: cannot be read")
    assert not (folder / "ran").exists()
