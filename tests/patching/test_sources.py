"""Checkpoints of every form are read, and those that are broken, quantised or no whole model are refused."""

from __future__ import annotations

import errno
import json
import os
import struct
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from normprobe.errors import NormprobeError
from normprobe.patching.options import PatchOptions
from normprobe.patching.run import patch
from normprobe.rewrites import AddQKNorm, FoldGains, Initialise, Rewrite
from normprobe.targets.options import TargetOptions
from tests.patching.checkpoints import contents, gpt2, llama, saved
from tests.targets.test_gguf import write as write_gguf

Source = Callable[[str], Path]
FAST = PatchOptions(level=None)
PICKLES = PatchOptions(level=None, target=TargetOptions(allow_pickle=True))
INDEX = "model.safetensors.index.json"


def refused(folder: Path, out: Path | None = None, options: PatchOptions = FAST, rewrite: Rewrite | None = None) -> str:
    """What is said; nothing may be left beside the checkpoint, and that has to be as it was."""
    before, beside = contents(folder), sorted(folder.parent.iterdir())
    with pytest.raises(NormprobeError) as caught:
        patch(str(folder), out or folder.parent / "out", [rewrite or FoldGains()], options)
    assert contents(folder) == before
    assert sorted(folder.parent.iterdir()) == beside
    return str(caught.value)


def edited(folder: Path, change: Callable[[dict[str, Tensor]], None]) -> None:
    path = folder / "model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path, metadata={"format": "pt"})


def pickled(folder: Path, sharded: bool) -> None:
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    if not sharded:
        torch.save(tensors, folder / "pytorch_model.bin")
        return
    names = sorted(tensors)
    parts = {"pytorch_model-00001-of-00002.bin": names[::2], "pytorch_model-00002-of-00002.bin": names[1::2]}
    for file, held in parts.items():
        torch.save({name: tensors[name] for name in held}, folder / file)
    places = {name: file for file, held in parts.items() for name in held}
    (folder / "pytorch_model.bin.index.json").write_text(json.dumps({"metadata": {}, "weight_map": places}))


@pytest.mark.parametrize("sharded", [False, True])
def test_pickles_are_read_where_that_is_allowed_and_become_safetensors(source: Source, sharded: bool) -> None:
    folder = source("llama")
    wanted = patch(str(folder), folder.parent / "safe", [FoldGains()], FAST)
    pickled(folder, sharded)
    assert "--allow-pickle" in refused(folder)
    found = patch(str(folder), folder.parent / "out", [FoldGains()], PICKLES)
    assert len(found.manifest.tensors) == (2 if sharded else 1)
    assert not list(found.out.glob("*.bin*"))
    states = [AutoModelForCausalLM.from_pretrained(each.out).state_dict() for each in (wanted, found)]
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])


def test_a_pickle_that_is_no_state_dict_is_refused(source: Source) -> None:
    folder = source("llama")
    (folder / "model.safetensors").unlink()
    torch.save([1, 2], folder / "pytorch_model.bin")
    assert "no state dict" in refused(folder, options=PICKLES)
    (folder / "pytorch_model.bin").write_bytes(b"no pickle")
    assert "cannot be read" in refused(folder, options=PICKLES)


def test_adapters_are_refused(source: Source) -> None:
    folder = source("llama")
    (folder / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": "org/base"}))
    said = refused(folder)
    assert "an adapter of org/base" in said
    assert "merge_and_unload" in said


def test_quantised_checkpoints_are_refused(source: Source) -> None:
    folder = source("llama")
    path = folder / "config.json"
    text = path.read_text()
    path.write_text(json.dumps({**json.loads(text), "quantization_config": {"quant_method": "gptq", "bits": 4}}))
    assert "quantization_config gptq" in refused(folder)
    path.write_text(text)
    edited(folder, lambda tensors: tensors.update({n: t.to(torch.int8) for n, t in tensors.items() if t.dim() > 1}))
    assert "weights stored as I8" in refused(folder)


def eight_bits(tensors: dict[str, Tensor]) -> None:
    tensors.update({n: t.to(torch.float8_e4m3fn) for n, t in tensors.items() if t.dim() > 1})


def test_eight_bit_floats_are_refused(source: Source) -> None:
    folder = source("llama")
    edited(folder, eight_bits)
    assert "weights stored as F8_E4M3" in refused(folder)


def test_tensors_that_the_model_does_not_use_come_along_as_they_are(source: Source) -> None:
    odd: dict[str, Tensor] = {
        "scalar": torch.tensor(3.5),
        "empty": torch.empty(0, 4),
        "whole": torch.arange(5),
        "eight": torch.randn(4).to(torch.float8_e5m2),
        "yes": torch.tensor([True, False]),
        'odd "name" \\ ü \n日本': torch.randn(2),
    }
    folder = source("llama")
    edited(folder, lambda tensors: tensors.update(odd))
    found = load_file(patch(str(folder), folder.parent / "out", [Initialise()], FAST).out / "model.safetensors")
    for name, tensor in odd.items():
        assert (found[name].dtype, found[name].shape) == (tensor.dtype, tensor.shape)
        assert torch.equal(found[name].reshape(-1).view(torch.uint8), tensor.reshape(-1).view(torch.uint8))


def test_a_tied_tensor_that_is_stored_twice_is_written_twice(source: Source) -> None:
    folder = saved(gpt2(), source("llama").parent / "tied")

    def doubled(tensors: dict[str, Tensor]) -> None:
        tensors["lm_head.weight"] = tensors["transformer.wte.weight"].clone()

    edited(folder, doubled)
    found = load_file(patch(str(folder), folder.parent / "out", [Initialise()], FAST).out / "model.safetensors")
    assert torch.equal(found["lm_head.weight"], found["transformer.wte.weight"])
    assert not torch.equal(found["lm_head.weight"], load_file(folder / "model.safetensors")["lm_head.weight"])


@pytest.mark.parametrize("rewrite", [Initialise(), AddQKNorm()])
def test_names_without_the_prefix_of_the_model_stay_so(source: Source, rewrite: Rewrite) -> None:
    folder = saved(gpt2(), source("llama").parent / "bare")
    prefix = "transformer."

    def bare(tensors: dict[str, Tensor]) -> None:
        held = {name.removeprefix(prefix): tensor for name, tensor in tensors.items()}
        tensors.clear()
        tensors.update(held)

    edited(folder, bare)
    found = patch(str(folder), folder.parent / "out", [rewrite], FAST)
    old, new = (load_file(each / "model.safetensors") for each in (folder, found.out))
    assert old.keys() <= new.keys()
    assert not [name for name in new if name.startswith(prefix)]


def test_a_gguf_file_becomes_safetensors(tmp_path: Path) -> None:
    pytest.importorskip("gguf")
    (tmp_path / "source").mkdir()
    tensors = write_gguf(tmp_path / "source" / "tiny.gguf")
    found = patch(str(tmp_path / "source" / "tiny.gguf"), tmp_path / "out", [FoldGains()], FAST)
    model = AutoModelForCausalLM.from_pretrained(found.out)
    stated = json.loads((found.out / "config.json").read_text())
    assert stated["architectures"] == ["LlamaForCausalLM"]
    assert "quantization_config" not in stated
    gain = torch.from_numpy(tensors["output_norm.weight"])
    head = (torch.from_numpy(tensors["output.weight"]).double() * gain.double()).float()
    assert torch.equal(model.lm_head.weight, head)
    assert bool((model.model.norm.weight == 1).all())
    assert found.manifest.loads == "plain"
    assert patch(str(found.out), tmp_path / "again", [Initialise()], FAST).manifest.loads == "plain"


def test_nan_in_a_weight_comes_along_and_is_told(source: Source) -> None:
    folder = source("llama")

    def spoilt(tensors: dict[str, Tensor]) -> None:
        tensors["model.layers.1.mlp.down_proj.weight"][0, 0] = float("nan")

    edited(folder, spoilt)
    found = patch(str(folder), folder.parent / "out", [Initialise(only="embeddings")], PatchOptions())
    assert found.after is not None
    assert any(finding.code == "NP504" for finding in found.after.findings)
    weights = load_file(found.out / "model.safetensors")
    assert bool(weights["model.layers.1.mlp.down_proj.weight"][0, 0].isnan())


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-40])


def header_of(text: bytes, length: int | None = None) -> Callable[[Path], None]:
    def write(path: Path) -> None:
        path.write_bytes(struct.pack("<Q", len(text) if length is None else length) + text + bytes(8))

    return write


TWICE = b'{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]},"a":{"dtype":"F32","shape":[1],"data_offsets":[4,8]}}'


@pytest.mark.parametrize(
    ("broken", "said"),
    [
        (cut, "truncated"),
        (header_of(b"{}", 2**40), "corrupt header"),
        (header_of(b"not json"), "cannot be read as safetensors"),
        (header_of(TWICE), "cannot be read as safetensors"),
        (lambda path: path.unlink(), "is missing"),
        (lambda path: path.write_bytes(b"version https://git-lfs.github.com/spec/v1\n"), "git lfs pull"),
    ],
)
def test_a_broken_shard_is_refused(source: Source, broken: Callable[[Path], None], said: str) -> None:
    folder = source("llama-sharded-bf16")
    broken(sorted(folder.glob("*.safetensors"))[1])
    assert said in refused(folder)


def index_of(folder: Path, change: Callable[[dict[str, str]], None]) -> None:
    index = json.loads((folder / INDEX).read_text())
    change(index["weight_map"])
    (folder / INDEX).write_text(json.dumps(index))


@pytest.mark.parametrize("place", ["../other.safetensors", "/etc/passwd", "sub/../../x.safetensors"])
def test_an_index_that_points_outside_is_refused(source: Source, place: str) -> None:
    folder = source("llama-sharded-bf16")
    index_of(folder, lambda places: places.update({next(iter(places)): place}))
    assert "outside the folder" in refused(folder)


def test_a_wrong_index_and_a_tensor_in_two_shards_are_refused(source: Source) -> None:
    folder = source("llama-sharded-bf16")
    files = sorted(path.name for path in folder.glob("*.safetensors"))
    whole = (folder / INDEX).read_text()
    index_of(folder, lambda places: places.update({next(n for n, f in places.items() if f == files[0]): files[1]}))
    assert "lacks tensors" in refused(folder)
    (folder / INDEX).write_text(whole)
    first, second = (load_file(folder / name) for name in files[:2])
    save_file({**second, next(iter(first)): next(iter(first.values()))}, folder / files[1], metadata={"format": "pt"})
    assert "is in two shards" in refused(folder)


def test_a_folder_without_weights_is_refused(source: Source) -> None:
    folder = source("llama")
    (folder / "model.safetensors").unlink()
    assert "no weights to patch" in refused(folder)
    (folder / "config.json").unlink()
    assert "config.json" in refused(folder)
    (folder / "file.txt").write_text("")
    with pytest.raises(NormprobeError, match="no checkpoint"):
        patch(str(folder / "file.txt"), folder.parent / "out", [FoldGains()], FAST)
    with pytest.raises(NormprobeError, match="no checkpoint"):
        patch("no/such/folder", folder.parent / "out", [FoldGains()], FAST)


def test_places_are_refused_before_anything_is_read(source: Source) -> None:
    folder = source("llama")
    (folder / "model.safetensors").write_bytes(b"broken")
    assert "is the checkpoint itself" in refused(folder, folder)
    assert "lies in the checkpoint" in refused(folder, folder / "out")
    (folder.parent / "link").symlink_to(folder)
    assert "is a link" in refused(folder, folder.parent / "link")


def test_a_full_disk_is_told_and_leaves_nothing(source: Source, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = source("llama")

    def full(*args: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", full)
    assert "the disk is full" in refused(folder)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 200 kB."""
    place = tmp_path / "disk"
    place.mkdir()
    mount = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=200k", "tmpfs", place], capture_output=True, check=False
    )
    if mount.returncode != 0:
        pytest.skip("no file system can be mounted here")
    yield place
    subprocess.run(["umount", place], check=True)


def test_a_disk_that_is_too_small_is_told_and_left_empty(tmp_path: Path, small_disk: Path) -> None:
    folder = saved(llama(hidden_size=64, intermediate_size=256), tmp_path / "source")
    with pytest.raises(NormprobeError, match="no room for the new folder"):
        patch(str(folder), small_disk / "out", [FoldGains()], FAST)
    assert list(small_disk.iterdir()) == []
