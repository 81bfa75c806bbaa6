from __future__ import annotations

import json
import os
import pickle
import random
from pathlib import Path

import numpy
import pytest
import torch

from normprobe.errors import CheckpointError, TargetError
from normprobe.targets import TargetOptions, resolve
from tests.targets import checkpoints


def test_safetensors_folder_holds_the_saved_weights(tmp_path: Path) -> None:
    saved = checkpoints.gpt2(tmp_path)
    loaded = resolve(str(tmp_path))
    assert checkpoints.same(loaded.model, saved)
    assert not loaded.model.training
    assert loaded.missing == loaded.unexpected == ()
    target = loaded.target
    assert (target.source, target.class_name, target.dtype) == ("folder", "GPT2LMHeadModel", "float32")
    assert target.parameters == sum(p.numel() for p in saved.parameters())


def test_sharded_folder_holds_the_saved_weights(tmp_path: Path) -> None:
    saved = checkpoints.gpt2(tmp_path, shard="8KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    assert checkpoints.same(resolve(str(tmp_path)).model, saved)


def test_the_model_runs_on_the_inputs(tmp_path: Path) -> None:
    checkpoints.gpt2(tmp_path)
    loaded = resolve(str(tmp_path), TargetOptions(batch=3, tokens=9))
    with torch.no_grad():
        assert loaded.model(**loaded.inputs).logits.shape == (3, 9, checkpoints.VOCABULARY)


@pytest.mark.parametrize("dtype", ["bfloat16", "float64"])
def test_dtype_is_the_one_asked_for(tmp_path: Path, dtype: str) -> None:
    checkpoints.gpt2(tmp_path)
    loaded = resolve(str(tmp_path), TargetOptions(dtype=dtype))
    assert loaded.target.dtype == dtype
    assert {str(p.dtype) for p in loaded.model.parameters()} == {f"torch.{dtype}"}


def test_saved_dtype_is_kept(tmp_path: Path) -> None:
    checkpoints.gpt2(tmp_path)
    resolve(str(tmp_path), TargetOptions(dtype="bf16")).model.save_pretrained(tmp_path / "half")
    assert resolve(str(tmp_path / "half")).target.dtype == "bfloat16"


@pytest.mark.parametrize("cut", [0, 4, 200, -1])
def test_truncated_file_is_named(tmp_path: Path, cut: int) -> None:
    checkpoints.gpt2(tmp_path)
    path = tmp_path / "model.safetensors"
    path.write_bytes(path.read_bytes()[:cut])
    with pytest.raises(CheckpointError, match=r"model\.safetensors: cannot be read as safetensors"):
        resolve(str(tmp_path))


def test_file_that_ends_early_is_called_truncated(tmp_path: Path) -> None:
    checkpoints.gpt2(tmp_path)
    path = tmp_path / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(CheckpointError, match="truncated"):
        resolve(str(tmp_path))


def test_corrupt_header_is_named(tmp_path: Path) -> None:
    checkpoints.gpt2(tmp_path)
    path = tmp_path / "model.safetensors"
    content = bytearray(path.read_bytes())
    content[8:40] = b"\xff" * 32
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match="corrupt header"):
        resolve(str(tmp_path))


def test_lfs_pointer_is_named(tmp_path: Path) -> None:
    checkpoints.gpt2(tmp_path)
    pointer = "version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 1\n"
    (tmp_path / "model.safetensors").write_text(pointer)
    with pytest.raises(CheckpointError, match="Git LFS pointer"):
        resolve(str(tmp_path))


def _sharded(folder: Path) -> tuple[Path, dict[str, str]]:
    checkpoints.gpt2(folder, shard="8KB")
    index = folder / "model.safetensors.index.json"
    return index, json.loads(index.read_text())["weight_map"]


def test_missing_shard_is_named(tmp_path: Path) -> None:
    _, weight_map = _sharded(tmp_path)
    name = sorted(set(weight_map.values()))[1]
    (tmp_path / name).unlink()
    with pytest.raises(CheckpointError, match=f"shard {name} is missing"):
        resolve(str(tmp_path))


def test_truncated_shard_is_named(tmp_path: Path) -> None:
    _, weight_map = _sharded(tmp_path)
    path = tmp_path / sorted(set(weight_map.values()))[1]
    path.write_bytes(path.read_bytes()[:-4])
    with pytest.raises(CheckpointError, match=f"{path.name}: cannot be read"):
        resolve(str(tmp_path))


@pytest.mark.parametrize(
    "name",
    [
        "../other.safetensors",
        "/etc/other.safetensors",
        "a/../../b.safetensors",
        "C:\\x.safetensors",
        "x.bin",
        3,
    ],
)
def test_shard_outside_the_folder_is_refused(tmp_path: Path, name: object) -> None:
    index, weight_map = _sharded(tmp_path)
    (tmp_path.parent / "other.safetensors").write_bytes(next(tmp_path.glob("*.safetensors")).read_bytes())
    key = sorted(weight_map)[0]
    index.write_text(json.dumps({"metadata": {}, "weight_map": {**weight_map, key: name}}))
    with pytest.raises(CheckpointError, match=f"{key} is placed outside the folder"):
        resolve(str(tmp_path))


def test_tensor_absent_from_its_shard_is_named(tmp_path: Path) -> None:
    _, weight_map = _sharded(tmp_path)
    key = "transformer.h.1.ln_1.weight"
    checkpoints.edit_weights(tmp_path / weight_map[key], **{key: None})
    with pytest.raises(CheckpointError, match=r"(?s)lacks tensors that .* transformer\.h\.1\.ln_1\.weight"):
        resolve(str(tmp_path))


def test_shards_without_index_are_refused(tmp_path: Path) -> None:
    index, _ = _sharded(tmp_path)
    index.unlink()
    with pytest.raises(CheckpointError, match="shards without their index"):
        resolve(str(tmp_path))


@pytest.mark.parametrize("text", ["{", "[]", '{"weight_map": {}}', '{"weight_map": []}', "{}"])
def test_broken_index_is_named(tmp_path: Path, text: str) -> None:
    index, _ = _sharded(tmp_path)
    index.write_text(text)
    with pytest.raises(CheckpointError, match=r"index\.json: no"):
        resolve(str(tmp_path))


def test_lost_norm_weights_are_said(tmp_path: Path) -> None:
    checkpoints.gpt2(tmp_path)
    checkpoints.edit_weights(tmp_path / "model.safetensors", rename={"ln_1.weight": "ln_1.scale"})
    loaded = resolve(str(tmp_path))
    assert loaded.missing == ("transformer.h.0.ln_1.weight", "transformer.h.1.ln_1.weight")
    assert loaded.unexpected == ("transformer.h.0.ln_1.scale", "transformer.h.1.ln_1.scale")
    assert any(note.startswith("2 of 29 tensors not in the checkpoint: newly initialised") for note in loaded.notes)
    (skipped,) = loaded.skipped
    assert skipped.what == "the trained values of 2 tensors"
    assert "transformer.h.0.ln_1.weight, transformer.h.1.ln_1.weight" in skipped.why
    assert any("transformer.h.1.ln_1.scale" in note and "not used" in note for note in loaded.notes)


def test_gamma_and_beta_are_either_read_or_said(tmp_path: Path) -> None:
    saved = checkpoints.bert(tmp_path)
    with torch.no_grad():
        saved.embeddings.LayerNorm.weight.fill_(3.0)
    saved.save_pretrained(tmp_path)
    renamed = {"LayerNorm.weight": "LayerNorm.gamma", "LayerNorm.bias": "LayerNorm.beta"}
    checkpoints.edit_weights(tmp_path / "model.safetensors", rename=renamed)
    loaded = resolve(str(tmp_path))
    read = loaded.model.embeddings.LayerNorm.weight[0].item() == 3.0
    said = "embeddings.LayerNorm.weight" in loaded.missing
    assert read != said


def test_newly_initialised_weights_follow_the_seed(tmp_path: Path) -> None:
    checkpoints.gpt2(tmp_path)
    key = "transformer.h.0.attn.c_attn.weight"
    checkpoints.edit_weights(tmp_path / "model.safetensors", **{key: None})
    first, again, other = (resolve(str(tmp_path), TargetOptions(seed=seed)).model for seed in (1, 1, 2))
    assert checkpoints.same(first, again)
    assert not checkpoints.same(first, other)


def test_other_shapes_are_an_error(tmp_path: Path) -> None:
    checkpoints.gpt2(tmp_path)
    checkpoints.edit_weights(tmp_path / "model.safetensors", **{"transformer.ln_f.weight": torch.ones(15)})
    with pytest.raises(TargetError, match=r"(?s)transformer\.ln_f\.weight.*\(16,\).*\(15,\)"):
        resolve(str(tmp_path))


def test_weights_of_another_model_are_an_error(tmp_path: Path) -> None:
    checkpoints.bert(tmp_path)
    checkpoints.config_file(tmp_path)
    with pytest.raises(TargetError, match=r"none of the .* parameters of GPT2LMHeadModel is in the files"):
        resolve(str(tmp_path))


def test_pickle_needs_the_flag_and_is_then_read(tmp_path: Path) -> None:
    saved = checkpoints.gpt2(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    torch.save(saved.state_dict(), tmp_path / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match=r"pytorch_model\.bin: pickled weights are refused"):
        resolve(str(tmp_path))
    assert checkpoints.same(resolve(str(tmp_path), TargetOptions(allow_pickle=True)).model, saved)


class _Bomb:
    def __init__(self, path: Path) -> None:
        self.path = str(path)

    def __reduce__(self) -> tuple[object, ...]:
        return os.mkdir, (self.path,)


def test_allowed_pickle_runs_no_code(tmp_path: Path) -> None:
    checkpoints.gpt2(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    with (tmp_path / "pytorch_model.bin").open("wb") as stream:
        pickle.dump({"x": _Bomb(tmp_path / "ran")}, stream, protocol=2)
    with pytest.raises(TargetError, match="cannot load this checkpoint"):
        resolve(str(tmp_path), TargetOptions(allow_pickle=True))
    assert not (tmp_path / "ran").exists()


def test_safetensors_come_before_a_pickle(tmp_path: Path) -> None:
    saved = checkpoints.gpt2(tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(b"not read")
    assert checkpoints.same(resolve(str(tmp_path), TargetOptions(allow_pickle=True)).model, saved)


def test_unknown_weight_names_are_no_bare_configuration(tmp_path: Path) -> None:
    checkpoints.gpt2(tmp_path)
    (tmp_path / "model.safetensors").rename(tmp_path / "adapter_model.safetensors")
    with pytest.raises(TargetError, match="no weights under a name"):
        resolve(str(tmp_path))


def test_folder_without_configuration_is_named(tmp_path: Path) -> None:
    (tmp_path / "readme.txt").write_text("")
    with pytest.raises(TargetError, match=r"(?s)no config\.json.*readme\.txt"):
        resolve(str(tmp_path))


def test_config_only_and_meta_read_no_weights(tmp_path: Path) -> None:
    checkpoints.gpt2(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"broken")
    assert "random weights (seed 0)" in resolve(str(tmp_path), TargetOptions(config_only=True)).notes
    assert resolve(str(tmp_path), TargetOptions(meta=True)).target.device == "meta"


def test_code_of_a_checkpoint_is_not_run_unasked(tmp_path: Path) -> None:
    checkpoints.config_file(
        tmp_path,
        model_type="own_model",
        architectures=["OwnModel"],
        auto_map={"AutoConfig": "own.OwnConfig", "AutoModel": "own.OwnModel"},
    )
    (tmp_path / "own.py").write_text(OWN_CODE.format(ran=str(tmp_path / "ran")))
    with pytest.raises(TargetError, match="--trust-remote-code"):
        resolve(str(tmp_path))
    assert not (tmp_path / "ran").exists()


def test_code_of_a_checkpoint_is_run_when_trusted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers import dynamic_module_utils

    monkeypatch.setattr(dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path / "modules"))
    folder = tmp_path / "own"
    checkpoints.config_file(
        folder,
        model_type="own_model",
        architectures=["OwnModel"],
        auto_map={"AutoConfig": "own.OwnConfig", "AutoModel": "own.OwnModel"},
    )
    (folder / "own.py").write_text(OWN_CODE.format(ran=str(tmp_path / "ran")))
    loaded = resolve(str(folder), TargetOptions(trust_remote_code=True))
    assert loaded.target.class_name == "OwnModel"
    assert (tmp_path / "ran").exists()


OWN_CODE = """
import pathlib
import torch
from transformers import PretrainedConfig, PreTrainedModel

pathlib.Path({ran!r}).touch()


class OwnConfig(PretrainedConfig):
    model_type = "own_model"


class OwnModel(PreTrainedModel):
    config_class = OwnConfig

    def __init__(self, config):
        super().__init__(config)
        self.embedding = torch.nn.Embedding(config.vocab_size, 4)
        self.post_init()

    def forward(self, input_ids):
        return self.embedding(input_ids)
"""


def test_random_states_are_put_back(tmp_path: Path) -> None:
    checkpoints.gpt2(tmp_path)
    checkpoints.edit_weights(tmp_path / "model.safetensors", **{"transformer.wte.weight": None})
    states = torch.get_rng_state(), random.getstate(), numpy.random.get_state()[1].copy()
    resolve(str(tmp_path))
    assert torch.equal(states[0], torch.get_rng_state())
    assert states[1] == random.getstate()
    assert (states[2] == numpy.random.get_state()[1]).all()


def test_nothing_is_printed(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    checkpoints.gpt2(tmp_path)
    checkpoints.edit_weights(tmp_path / "model.safetensors", rename={"ln_1.weight": "ln_1.scale"})
    capfd.readouterr()
    resolve(str(tmp_path))
    assert capfd.readouterr() == ("", "")
