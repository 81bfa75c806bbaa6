"""SmolLM2 with fitted norms on its queries and keys, as a checkpoint: loaded in three ways, generating, and trained."""

from __future__ import annotations

import copy
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoTokenizer

import normprobe
from benchmarks import smollm
from normprobe.patching.options import PatchOptions
from normprobe.patching.run import patch
from normprobe.rewrites import AddQKNorm
from normprobe.targets.options import TargetOptions
from normprobe.targets.quiet import quiet
from tests.patching.training import losses, ways

TOKENS, STEPS = 24, 10


@pytest.fixture(scope="module")
def out(smollm2_gguf: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The patched checkpoint, which takes half a gigabyte: it goes when the tests are done."""
    for needed in ("gguf", "accelerate"):
        pytest.importorskip(needed)
    folder = tmp_path_factory.mktemp("smollm2")
    options = PatchOptions(level=None, target=TargetOptions(tokens=TOKENS))
    yield patch(str(smollm2_gguf), folder / "out", [AddQKNorm(start="calibrated")], options).out
    shutil.rmtree(folder)


def opened(way: str, folder: Path) -> Any:
    with quiet():
        return ways()[way](folder).eval()


def logits(model: Any, ids: Tensor) -> Tensor:
    with torch.no_grad():
        found: Tensor = model(ids).logits
    return found


def generated(model: Any, ids: Tensor, cache: bool) -> Tensor:
    found: Tensor = model.generate(ids, max_new_tokens=6, do_sample=False, use_cache=cache, pad_token_id=0)
    return found


def test_smollm2_loads_in_three_ways_and_generates(out: Path, smollm2_loaded: Any) -> None:
    ids = AutoTokenizer.from_pretrained(out)("The capital of France is", return_tensors="pt").input_ids
    model = opened("load", out)
    wanted, text = logits(model, ids), generated(model, ids, cache=True)
    assert torch.equal(generated(model, ids, cache=False), text)
    assert text.shape == (1, ids.shape[1] + 6)
    plain = copy.deepcopy(smollm2_loaded.model)
    assert not torch.allclose(logits(plain, ids), wanted, atol=0.1)
    for each in (opened("code", out), normprobe.apply_manifest(plain, out)):
        assert torch.equal(logits(each, ids), wanted)
        assert torch.equal(generated(each, ids, cache=True), text)


def test_smollm2_trains_on_from_its_checkpoint(out: Path) -> None:
    ids = smollm.text_ids((STEPS + 1) * TOKENS, AutoTokenizer.from_pretrained(out)).reshape(STEPS + 1, TOKENS)
    folder = out.parent / "run"
    _, whole = losses(opened("code", out), folder, ids, steps=STEPS + 1, saved=STEPS)
    checkpoint = folder / f"checkpoint-{STEPS}"
    _, rest = losses(opened("load", checkpoint), folder / "rest", ids, checkpoint, steps=STEPS + 1, saved=0)
    assert sorted(whole) == list(range(1, STEPS + 2))
    assert rest == {STEPS + 1: whole[STEPS + 1]}
    assert whole[STEPS + 1] < whole[1]
