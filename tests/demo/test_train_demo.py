"""examples/train_demo.py: it learns, it repeats, and it counts bits as the closed form says."""

from __future__ import annotations

import importlib.util
from math import log2, sqrt
from pathlib import Path
from types import ModuleType

import pytest
import torch

from normprobe.demo import Decoder, encode, heldout_text
from normprobe.demo.model import ALPHABET, CONTEXT


@pytest.fixture(scope="module")
def example(root: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location("train_demo", root / "examples" / "train_demo.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def small(example: ModuleType, seed: int) -> Decoder:
    model = Decoder(width=16, depth=1, heads=2)
    example.initialise(model, seed)
    return model


def test_training_lowers_the_loss(example: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    tokens = encode(example.training_text()[:20_000])
    model = small(example, 0)
    before = example.bits(model, tokens[: 20 * CONTEXT])
    example.train(model, tokens, 30, 0)
    assert example.bits(model, tokens[: 20 * CONTEXT]) < before - 0.5
    assert "step    29" in capsys.readouterr().out


def test_one_seed_gives_one_result(example: ModuleType) -> None:
    tokens = encode(heldout_text())
    results = []
    for seed in (1, 1, 2):
        model = small(example, seed)
        example.train(model, tokens, 3, seed)
        results.append(torch.cat([p.detach().flatten() for p in model.parameters()]))
    assert torch.equal(results[0], results[1])
    assert not torch.equal(results[0], results[2])


def test_a_model_without_opinion_needs_log2_of_the_alphabet(example: ModuleType) -> None:
    model = small(example, 0)
    torch.nn.init.zeros_(model.head.weight)
    assert example.bits(model, encode(heldout_text())) == pytest.approx(log2(len(ALPHABET)), abs=1e-5)


def test_the_heldout_text_is_not_in_the_training_text(example: ModuleType) -> None:
    text = example.training_text()
    assert len(text) == 633_203
    assert set(text) == set(ALPHABET)
    verses = [verse for verse in heldout_text().splitlines() if len(verse) > 60]
    assert len(verses) > 70
    assert [verse for verse in verses if verse in text] == []


def test_windows_are_runs_of_the_text(example: ModuleType) -> None:
    tokens = torch.arange(1000)
    batch = next(example.windows(tokens, 0))
    assert batch.shape == (example.BATCH, CONTEXT + 1)
    assert (batch.diff(dim=1) == 1).all()
    assert batch.max() < 1000


def test_writers_start_smaller_by_the_root_of_their_number(example: ModuleType) -> None:
    model = Decoder(width=128, depth=4)
    example.initialise(model, 0)
    block = model.blocks[2]
    for weight, std in (
        (block.attention.query_key_value.weight, 1 / sqrt(128)),
        (block.up.weight, 1 / sqrt(128)),
        (block.attention.output.weight, 1 / sqrt(128 * 8)),
        (block.down.weight, 1 / sqrt(512 * 8)),
        (model.embedding.weight, 1.0),
    ):
        assert weight.std().item() == pytest.approx(std, rel=0.03)


def test_gains_embedding_and_head_are_not_decayed(example: ModuleType) -> None:
    model = small(example, 0)
    decayed, kept = (set(map(id, group["params"])) for group in example.optimiser(model).param_groups)
    gains = {id(p) for name, p in model.named_parameters() if name.endswith("norm.weight")}
    assert kept == gains | {id(model.embedding.weight), id(model.head.weight)}
    assert len(decayed) + len(kept) == len(list(model.parameters()))
