from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from normprobe.errors import InputError
from normprobe.targets import TargetOptions, resolve
from normprobe.targets.inputs import sample_text
from tests.targets import checkpoints


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    checkpoints.gpt2(tmp_path)
    checkpoints.tokenizer_file(tmp_path)
    return tmp_path


def test_sample_is_long_enough_for_every_tokenizer() -> None:
    text = sample_text()
    assert len(text.split()) >= 1200
    assert text.isascii()


def test_own_tokenizer_reads_the_sample(folder: Path) -> None:
    loaded = resolve(str(folder))
    assert loaded.target.inputs == "bundled sample text, 32 tokens"
    ids = loaded.inputs["input_ids"]
    assert ids.shape == (1, 32)
    assert (ids[0, 0], ids[0, -1]) == (1, 2)
    expected = loaded.tokenizer(sample_text(), add_special_tokens=False)["input_ids"][:30]
    assert ids[0, 1:-1].tolist() == expected


def test_rows_go_on_through_the_text(folder: Path) -> None:
    loaded = resolve(str(folder), TargetOptions(batch=3, tokens=10))
    rows = loaded.inputs["input_ids"][:, 1:-1]
    assert rows.flatten().tolist() == loaded.tokenizer(sample_text(), add_special_tokens=False)["input_ids"][:24]
    assert loaded.target.inputs == "bundled sample text, 3 rows of 10 tokens"


def test_given_text_is_used(folder: Path) -> None:
    loaded = resolve(str(folder), TargetOptions(text="The word20 and word21 .", batch=2))
    assert loaded.inputs["input_ids"].tolist() == [[1, 3, 20, 6, 21, 13, 2]] * 2
    assert loaded.target.inputs.startswith("the given text")


def test_text_file_is_used_and_named(folder: Path) -> None:
    path = folder / "mine.txt"
    path.write_text("word30 word31")
    loaded = resolve(str(folder), TargetOptions(text_file=str(path)))
    assert loaded.inputs["input_ids"].tolist() == [[1, 30, 31, 2]]
    assert loaded.target.inputs == "text of mine.txt, 4 tokens"


@pytest.mark.parametrize("tokens", [1, 2, 3])
def test_rows_too_short_for_special_ids(folder: Path, tokens: int) -> None:
    assert resolve(str(folder), TargetOptions(tokens=tokens)).inputs["input_ids"].shape == (1, tokens)


def test_missing_text_file_is_named(folder: Path) -> None:
    with pytest.raises(InputError, match=r"gone\.txt: no such text file"):
        resolve(str(folder), TargetOptions(text_file=str(folder / "gone.txt")))


def test_empty_text_is_an_error(folder: Path) -> None:
    with pytest.raises(InputError, match="no tokens"):
        resolve(str(folder), TargetOptions(text=""))


def test_text_without_tokenizer_is_an_error(tmp_path: Path) -> None:
    checkpoints.gpt2(tmp_path)
    with pytest.raises(InputError, match="no tokenizer"):
        resolve(str(tmp_path), TargetOptions(text="hello"))


def test_text_for_an_image_model_is_an_error() -> None:
    with pytest.raises(InputError, match="the model takes none"):
        resolve("vit", TargetOptions(config_only=True, meta=True, text="hello"))


def test_no_tokenizer_is_said(tmp_path: Path) -> None:
    checkpoints.gpt2(tmp_path)
    loaded = resolve(str(tmp_path))
    assert loaded.tokenizer is None
    assert any("seeded random ids" in note and "no tokenizer" in note for note in loaded.notes)


def test_broken_tokenizer_is_said_and_the_model_still_loads(folder: Path) -> None:
    (folder / "tokenizer.json").write_text("{")
    loaded = resolve(str(folder))
    assert loaded.tokenizer is None
    assert any("tokenizer not readable" in note for note in loaded.notes)
    assert loaded.inputs["input_ids"].shape == (1, 32)


def test_tokenizer_of_a_larger_vocabulary_is_not_used(folder: Path) -> None:
    checkpoints.tokenizer_file(folder, words=200)
    text = TargetOptions(text="word150")
    with pytest.raises(InputError, match="ids up to 150, the model has 64 embeddings"):
        resolve(str(folder), text)


def test_minilm(minilm_folder: Path) -> None:
    loaded = resolve(str(minilm_folder))
    assert (loaded.target.class_name, loaded.target.parameters) == ("BertModel", 22_713_216)
    assert loaded.missing == ()
    ids = loaded.inputs["input_ids"]
    assert ids.shape == (1, 512)
    assert (ids[0, 0], ids[0, -1]) == (101, 102)  # [CLS] and [SEP] of BERT's vocabulary
    assert len(loaded.tokenizer(sample_text())["input_ids"]) >= 1600
    with torch.no_grad():
        assert torch.isfinite(loaded.model(**loaded.inputs).last_hidden_state).all()


def test_tokens_beyond_the_model_are_said(folder: Path, tmp_path: Path) -> None:
    said = resolve(str(folder), TargetOptions(tokens=5000, text="a " * 6000)).target.inputs
    assert re.search(r", \d+ of 5000 tokens asked for \(the model's maximum\)", said), said
    checkpoints.config_file(tmp_path)
    said = resolve(str(tmp_path), TargetOptions(tokens=5000)).target.inputs
    assert re.search(r", \d+ of 5000 tokens asked for \(the model's maximum\)", said), said
    assert "asked for" not in resolve(str(tmp_path), TargetOptions(tokens=4)).target.inputs


def test_a_text_file_that_is_not_there_is_said_for_every_target(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="nope: no such text file"):
        resolve("normprobe.demo.model:build", TargetOptions(text_file=str(tmp_path / "nope")))
