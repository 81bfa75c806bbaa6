from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import nn

from normprobe.errors import CheckpointError, SettingError, TargetError
from normprobe.targets import TargetOptions, config, resolve
from tests.targets import checkpoints

META = TargetOptions(config_only=True, meta=True)


@pytest.mark.parametrize(
    ("name", "class_name"),
    [
        ("gpt2", "GPT2LMHeadModel"),
        ("llama", "LlamaForCausalLM"),
        ("bert", "BertForMaskedLM"),
        ("t5", "T5ForConditionalGeneration"),
        ("bart", "BartForConditionalGeneration"),
        ("vit", "ViTForImageClassification"),
        ("convnext", "ConvNextForImageClassification"),
        ("resnet", "ResNetForImageClassification"),
        ("whisper", "WhisperForConditionalGeneration"),
        ("wav2vec2", "Wav2Vec2ForCTC"),
        ("llama4_text", "Llama4ForCausalLM"),
        ("qwen2_vl", "Qwen2VLForConditionalGeneration"),
    ],
)
def test_model_type_gets_its_head_without_memory(name: str, class_name: str) -> None:
    loaded = resolve(name, META)
    assert loaded.target.class_name == class_name
    assert {tensor.device.type for tensor in [*loaded.model.parameters(), *loaded.model.buffers()]} == {"meta"}
    assert {value.device.type for value in loaded.inputs.values()} == {"meta"}
    assert "meta device: shapes without weights" in loaded.notes


@pytest.mark.parametrize("name", ["t5", "vit", "convnext", "resnet", "whisper", "wav2vec2", "clip"])
def test_model_runs_on_its_inputs(name: str) -> None:
    loaded = resolve(name, META)
    with torch.no_grad():
        output = loaded.model(**loaded.inputs)
    assert output[0].is_meta
    assert output[0].shape[0] == 1


def test_gpt2_has_the_published_size() -> None:
    assert resolve("gpt2", META).target.parameters == 124_439_808  # Radford et al. 2019, with tied embeddings


def test_config_file_gives_seeded_random_weights(tmp_path: Path) -> None:
    path = str(checkpoints.config_file(tmp_path))
    first, again, other = (resolve(path, TargetOptions(seed=seed)) for seed in (3, 3, 4))
    assert checkpoints.same(first.model, again.model)
    assert not checkpoints.same(first.model, other.model)
    assert "random weights (seed 3)" in first.notes
    assert (first.target.source, first.target.class_name) == ("config", "GPT2LMHeadModel")


def test_random_weights_leave_the_random_state_alone(tmp_path: Path) -> None:
    path = str(checkpoints.config_file(tmp_path))
    before = torch.get_rng_state()
    resolve(path)
    assert torch.equal(before, torch.get_rng_state())


def test_any_json_name_and_a_bare_folder_work(tmp_path: Path) -> None:
    path = checkpoints.config_file(tmp_path / "folder")
    other = path.rename(tmp_path / "tiny.json")
    from_file = resolve(str(other))
    checkpoints.config_file(tmp_path / "folder")
    assert checkpoints.same(from_file.model, resolve(str(tmp_path / "folder")).model)


def test_architectures_choose_the_head(tmp_path: Path) -> None:
    path = checkpoints.config_file(tmp_path, architectures=["GPT2ForSequenceClassification"])
    assert resolve(str(path)).target.class_name == "GPT2ForSequenceClassification"


@pytest.mark.parametrize("named", ["NoSuchModel", "BertModel", "AutoModel", "pipeline"])
def test_architectures_that_do_not_fit_are_passed_over(tmp_path: Path, named: str) -> None:
    path = checkpoints.config_file(tmp_path, architectures=[named])
    assert resolve(str(path)).target.class_name == "GPT2LMHeadModel"


def test_dtype_of_the_configuration_is_kept_and_can_be_overruled(tmp_path: Path) -> None:
    path = str(checkpoints.config_file(tmp_path, dtype="bfloat16"))
    assert resolve(path).target.dtype == "bfloat16"
    assert resolve(path, TargetOptions(dtype="fp64")).target.dtype == "float64"
    assert torch.get_default_dtype() == torch.float32


def test_unknown_model_type_is_named_with_the_version(tmp_path: Path) -> None:
    import transformers

    path = checkpoints.config_file(tmp_path, model_type="gpt99")
    with pytest.raises(TargetError, match=f"(?s)unknown model type 'gpt99'.*{transformers.__version__}"):
        resolve(str(path))


def test_missing_model_type_is_named(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"_class_name": "UNet2DConditionModel"}))
    with pytest.raises(TargetError, match=r"(?s)not a model of transformers.*_class_name"):
        resolve(str(path))


@pytest.mark.parametrize("text", ["", "{", "[1]", '"x"', "\x00"])
def test_broken_json_is_named(tmp_path: Path, text: str) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(CheckpointError, match=r"config\.json: no (valid )?JSON"):
        resolve(str(tmp_path))


def test_impossible_sizes_are_named(tmp_path: Path) -> None:
    path = checkpoints.config_file(tmp_path, n_head=3)
    with pytest.raises(TargetError, match=r"config\.json: (no model can be built|transformers cannot read)"):
        resolve(str(path))


def test_model_larger_than_memory_is_refused_before_it_is_built(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(config, "available_memory", lambda: 400_000_000)
    with pytest.raises(TargetError, match=r"(?s)too large.*0\.4 GiB.*124,439,808 parameters, 0\.5 GiB.*--meta"):
        resolve("gpt2", TargetOptions(config_only=True))
    assert resolve("gpt2", META).target.device == "meta"


def test_memory_counts_bytes_not_parameters(monkeypatch: pytest.MonkeyPatch) -> None:
    with torch.device("meta"):
        model = nn.Linear(100, 10, bias=False)
    monkeypatch.setattr(config, "available_memory", lambda: 4000)
    config.check_memory(model, "exactly 4000 bytes")
    monkeypatch.setattr(config, "available_memory", lambda: 3999)
    with pytest.raises(TargetError, match="one byte short: too large"):
        config.check_memory(model, "one byte short")


def test_auto_map_beside_a_known_type_is_refused_too(tmp_path: Path) -> None:
    path = checkpoints.config_file(tmp_path, auto_map={"AutoModel": "own.OwnModel"})
    with pytest.raises(TargetError, match=r"(?s)auto_map.*own\.OwnModel.*--trust-remote-code"):
        resolve(str(path))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dtype": "int8"}, "unknown dtype"),
        ({"device": "abacus"}, "cannot use device 'abacus'"),
    ],
)
def test_unknown_places_are_named(tmp_path: Path, options: dict[str, str], message: str) -> None:
    path = checkpoints.config_file(tmp_path)
    with pytest.raises(SettingError, match=message):
        resolve(str(path), TargetOptions(**options))


@pytest.mark.parametrize("options", [{"batch": 0}, {"tokens": 0}, {"text": "a", "text_file": "b"}])
def test_options_that_contradict_are_refused(options: dict[str, object]) -> None:
    with pytest.raises(SettingError, match=r"out of range|both given"):
        TargetOptions(**options)
