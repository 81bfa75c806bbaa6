"""A model of one's own that the changes of a folder were put into is one that was loaded from it, and is saved so."""

from __future__ import annotations

import copy
import json
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    LlamaForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
    Trainer,
    TrainingArguments,
)

import normprobe
from normprobe.errors import CheckpointError, TargetError
from normprobe.patching.options import PatchOptions
from normprobe.patching.run import patch
from normprobe.rewrites import AddQKNorm, Rewrite, SetEps, ToRMSNorm
from normprobe.targets.quiet import quiet
from tests.patching.checkpoints import IDS, gpt2, llama, logits, made, saved
from tests.patching.training import ways

WAYS = ("load", "code", "manifest")


def patched(model: Any, folder: Path, *rewrites: Rewrite) -> Path:
    return patch(str(saved(model, folder / "source")), folder / "out", rewrites, PatchOptions(level=None)).out


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A patched Llama, which the tests only read."""
    return patched(llama(), tmp_path_factory.mktemp("applied"), AddQKNorm())


def alike(folder: Path, wanted: Tensor) -> bool:
    with quiet():
        return all(torch.equal(logits(way(folder)), wanted) for way in ways().values())


@pytest.mark.parametrize(
    ("model", "rewrites"),
    [
        (gpt2, (ToRMSNorm(tied="untie"), AddQKNorm())),
        (llama, (SetEps(eps=1e-3), AddQKNorm())),
    ],
)
def test_fields_that_the_patch_changed_are_saved_too(model: Any, rewrites: tuple[Rewrite, ...], tmp_path: Path) -> None:
    """Here a head that is no longer tied, which would be tied again as it is loaded; and an eps."""
    folder = patched(model(), tmp_path, *rewrites)
    mine = normprobe.apply_manifest(AutoModelForCausalLM.from_pretrained(tmp_path / "source"), folder).eval()
    mine.save_pretrained(tmp_path / "again")
    assert torch.equal(logits(mine), logits(normprobe.load(folder)))
    assert alike(tmp_path / "again", logits(mine))
    stated, wanted = (json.loads((each / "config.json").read_text()) for each in (tmp_path / "again", folder))
    assert stated == {**wanted, "dtype": stated["dtype"]}


def test_another_model_of_the_same_configuration_keeps_it(out: Path, tmp_path: Path) -> None:
    config = AutoConfig.from_pretrained(out.parent / "source")
    mine, other = (LlamaForCausalLM(config) for _ in range(2))
    before = copy.deepcopy(config.to_dict())
    normprobe.apply_manifest(mine, out)
    held = {id(module.config) for module in mine.modules() if hasattr(module, "config")}
    assert held == {id(mine.config)} != {id(config)}
    assert config.to_dict() == before
    other.save_pretrained(tmp_path / "other")
    assert type(normprobe.load(tmp_path / "other")) is LlamaForCausalLM


class Mine(LlamaForCausalLM):
    """A class of one's own, with a method that the base lacks."""

    def last(self, ids: Tensor) -> Tensor:
        found: Tensor = self(ids).logits[:, -1]
        return found


def test_a_class_of_ones_own_stays_below(out: Path, tmp_path: Path) -> None:
    mine = normprobe.apply_manifest(Mine.from_pretrained(out.parent / "source"), out).eval()
    assert isinstance(mine, Mine)
    with torch.no_grad():
        assert torch.equal(copy.deepcopy(mine).last(IDS), logits(normprobe.load(out))[:, -1])
    mine.save_pretrained(tmp_path / "again")
    assert alike(tmp_path / "again", logits(mine))
    with torch.no_grad(), quiet():
        again = type(mine).from_pretrained(tmp_path / "again").eval()
        assert torch.equal(again.last(IDS), mine.last(IDS))


def test_a_class_of_ones_own_is_pickled(out: Path) -> None:
    mine = normprobe.apply_manifest(Mine.from_pretrained(out.parent / "source"), out)
    again = pickle.loads(pickle.dumps(mine))
    assert type(again) is type(mine)
    assert torch.equal(logits(again), logits(mine))


def test_adapters_on_it_name_the_patched_folder(out: Path) -> None:
    mine = normprobe.apply_manifest(AutoModelForCausalLM.from_pretrained(out.parent / "source"), out)
    assert mine.name_or_path == mine.config.name_or_path == str(out)


def test_an_encoder_and_a_decoder_state_the_eps_too(tmp_path: Path) -> None:
    sizes = {"vocab_size": 64, "d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 1, "num_heads": 4}
    model = made(T5ForConditionalGeneration, T5Config(**sizes, decoder_start_token_id=0, pad_token_id=0))
    folder = patched(model, tmp_path, SetEps(eps=1e-3), AddQKNorm())
    mine = normprobe.apply_manifest(T5ForConditionalGeneration.from_pretrained(tmp_path / "source"), folder)
    assert {each.config.layer_norm_epsilon for each in (mine, mine.encoder, mine.decoder)} == {1e-3}


def test_a_model_built_from_the_configuration_of_the_folder_takes_the_changes(out: Path) -> None:
    mine = normprobe.apply_manifest(LlamaForCausalLM(AutoConfig.from_pretrained(out)), out)
    assert torch.equal(logits(mine.eval()), logits(normprobe.load(out)))


def test_what_was_added_is_in_the_mode_of_what_is_around_it(out: Path) -> None:
    mine = normprobe.apply_manifest(llama().train(), out)
    assert all(module.training for module in mine.modules())


def test_a_model_that_is_offloaded_in_part_is_refused(out: Path) -> None:
    model = llama()
    model.model.layers[1].to("meta")
    with pytest.raises(CheckpointError, match=r"(?s)offloaded in part.*layers\.1.*device_map"):
        normprobe.apply_manifest(model, out)
    assert type(model) is LlamaForCausalLM


@pytest.mark.parametrize("record", [3, None, [], {}, {"base": "LlamaForCausalLM", "part": "model"}])
def test_a_damaged_record_is_named(out: Path, tmp_path: Path, record: Any) -> None:
    config = json.loads((out / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "normprobe": record}))
    match = "lists no changes" if record is None else r'(?s)"normprobe" of config\.json is damaged.*"base", "part"'
    with pytest.raises(CheckpointError, match=match):
        normprobe.apply_manifest(llama(), tmp_path)


class Wrapped(nn.Module):
    """The modules of a Llama in a class that transformers does not know."""

    def __init__(self, model: LlamaForCausalLM) -> None:
        super().__init__()
        self.model, self.lm_head = model.model, model.lm_head

    def forward(self, ids: Tensor) -> Tensor:
        found: Tensor = self.lm_head(self.model(ids).last_hidden_state)
        return found


def test_a_model_that_is_not_of_transformers_keeps_its_class(out: Path) -> None:
    mine = normprobe.apply_manifest(Wrapped(llama()), out)
    assert type(mine) is Wrapped
    with torch.no_grad():
        assert torch.equal(mine(IDS), logits(normprobe.load(out)))


@pytest.mark.parametrize("way", WAYS)
def test_a_model_that_has_changes_is_refused(out: Path, way: str) -> None:
    model = ways()[way](out)
    with pytest.raises(CheckpointError, match=r"PatchedLlamaForCausalLM has the changes of a patched checkpoint"):
        normprobe.apply_manifest(model, out)
    assert torch.equal(logits(model), logits(normprobe.load(out)))


def test_a_class_that_transformers_lacks_is_named(out: Path, tmp_path: Path) -> None:
    config = json.loads((out / "config.json").read_text())
    config["normprobe"]["base"] = "NextForCausalLM"
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(TargetError, match="has no class NextForCausalLM"):
        normprobe.apply_manifest(llama(), tmp_path)


@pytest.mark.parametrize("way", WAYS)
def test_smoothed_labels_are_shifted_as_for_the_class_below(out: Path, tmp_path: Path, way: str) -> None:
    """Trainer shifts them for the names of classes that it knows."""
    pytest.importorskip("accelerate")
    options = {"report_to": [], "use_cpu": True, "disable_tqdm": True}
    arguments = TrainingArguments(output_dir=str(tmp_path), label_smoothing_factor=1e-9, **options)
    model = ways()[way](out)
    trainer = Trainer(model, arguments)
    found = trainer.compute_loss(model, {"input_ids": IDS, "labels": IDS})
    wanted = model(input_ids=IDS, labels=IDS).loss
    torch.testing.assert_close(found, wanted)


@pytest.mark.parametrize("way", ["load", "manifest"])
def test_what_is_sent_to_the_hub_has_the_code(
    out: Path, tmp_path: Path, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent: set[str] = set()

    class Hub:
        def create_repo(self, name: str, **options: Any) -> Any:
            return type("Repository", (), {"repo_id": name})()

        def create_commit(self, *, operations: Any, **options: Any) -> None:
            sent.update(each.path_in_repo for each in operations)

        def create_branch(self, **options: Any) -> None: ...

    for module in ("transformers.modeling_utils", "transformers.utils.hub"):
        monkeypatch.setattr(f"{module}.hf_api", Hub)
    ways()[way](out).save_pretrained(tmp_path / "mine", push_to_hub=True)
    assert {"config.json", "model.safetensors", "modeling_normprobe.py"} <= sent
