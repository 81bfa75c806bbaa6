"""What lies in a patched folder is checked later, and put into no other model."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, GemmaConfig, GemmaForCausalLM

import normprobe
from normprobe.errors import CheckpointError
from normprobe.patching.options import PatchOptions
from normprobe.patching.run import patch
from normprobe.patching.same import same_model
from normprobe.patching.verify import verify
from normprobe.rewrites import AddQKNorm, FoldGains
from tests.patching.checkpoints import HEADS, SIZES

Source = Callable[[str], Path]
FAST = PatchOptions(level=None)


@pytest.mark.parametrize(("said", "other"), [('"BF16"', '"F16" '), ('"shape":[64,32]', '"shape":[32,64]')])
def test_bytes_that_are_read_as_other_numbers_are_told(source: Source, said: str, other: str) -> None:
    folder = source("llama-sharded-bf16")
    out = patch(str(folder), folder.parent / "out", [FoldGains()], FAST).out
    assert verify(out).problems == ()
    path = next(each for each in sorted(out.glob("*.safetensors")) if said.encode() in each.read_bytes())
    path.write_bytes(path.read_bytes().replace(said.encode(), other.encode()))
    assert verify(out).problems == (f"{path.name}: other names, dtypes, shapes or places in its header",)


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-8])


def exchanged(path: Path) -> None:
    held = load_file(path)
    save_file({"more": held.pop("model.norm.weight"), **held}, path, {"format": "pt"})


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (Path.unlink, ["model.safetensors: missing"]),
        (cut, ["cannot be read as safetensors.*truncated"]),
        (exchanged, ["model.norm.weight: missing", "more: added since", "or places in its header"]),
    ],
)
def test_weights_that_went_or_came_are_told(source: Source, change: Callable[[Path], None], said: list[str]) -> None:
    folder = source("llama")
    out = patch(str(folder), folder.parent / "out", [FoldGains()], FAST).out
    change(out / "model.safetensors")
    problems = verify(out).problems
    assert len(problems) == len(said)
    assert all(re.search(pattern, each, re.DOTALL) for pattern, each in zip(said, problems, strict=True))


def test_a_folder_is_checked_from_inside(source: Source, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = source("llama")
    out = patch(str(folder), folder.parent / "out", [FoldGains()], FAST).out
    monkeypatch.chdir(out)
    assert verify(Path()).problems == ()
    with pytest.raises(CheckpointError, match=r"out exists"):
        patch(str(folder), Path(), [FoldGains()], FAST)


def test_an_architecture_with_the_same_tensors_is_not_what_was_patched(source: Source) -> None:
    folder = source("llama")
    out = patch(str(folder), folder.parent / "out", [AddQKNorm()], FAST).out
    other = GemmaForCausalLM(GemmaConfig(**{**SIZES, **HEADS, "head_dim": 8, "tie_word_embeddings": False}))
    before = str(other)
    with pytest.raises(CheckpointError, match=r"(?s)GemmaForCausalLM is not what was patched.*LlamaForCausalLM"):
        normprobe.apply_manifest(other, out)
    assert str(other) == before


def test_what_was_added_is_trained(source: Source) -> None:
    folder = source("llama")
    out = patch(str(folder), folder.parent / "out", [AddQKNorm()], FAST).out
    plain = AutoModelForCausalLM.from_pretrained(folder)
    code = AutoModelForCausalLM.from_pretrained(out, trust_remote_code=True)
    for model in (normprobe.load(out), code, normprobe.apply_manifest(plain, out)):
        assert all(parameter.requires_grad for parameter in model.parameters())
        assert len(list(model.parameters())) == 25


@pytest.mark.skipif(sys.platform != "linux", reason="other systems refuse such names")
def test_names_that_are_no_utf_8_are_held_apart_and_found_again(source: Source) -> None:
    folder = source("llama")
    names = {rb"bad\xff.txt": r"bad\\xff.txt", b"bad\xff.txt": r"bad\xff.txt", "gut\xe9.txt".encode(): "gut\xe9.txt"}
    for name in (*names, b"old\xfe.bin"):
        Path(folder, os.fsdecode(name)).write_bytes(name)
    found = patch(str(folder), folder.parent / "out", [FoldGains()], FAST)
    assert set(names.values()) < found.manifest.files.keys()
    assert r"old\xfe.bin" in found.manifest.left_out
    assert verify(found.out).problems == ()
    Path(found.out, os.fsdecode(b"bad\xff.txt")).rename(found.out / os.fsdecode(b"bad\xfe.txt"))
    assert verify(found.out).problems == (r"bad\xff.txt: missing", r"bad\xfe.txt: added since")


def test_a_model_without_outputs_is_not_one_with_some() -> None:
    class Gives(nn.Module):
        def __init__(self, factor: float | None) -> None:
            super().__init__()
            self.factor = factor

        def forward(self, x: Tensor) -> Tensor | None:
            return None if self.factor is None else self.factor * x

    x = torch.ones(2)
    assert not same_model(Gives(None), Gives(2.0), x)
    assert not same_model(Gives(2.0), Gives(3.0), x)
    assert same_model(Gives(2.0), Gives(2.0), x)
    assert same_model(Gives(2.0), Gives(3.0), x, [2 * x]), "what was given before is taken for its own"
