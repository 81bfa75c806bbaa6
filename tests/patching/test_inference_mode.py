"""Patched checkpoints that are loaded in inference mode: torch trains nothing that was made in it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import normprobe
from normprobe.patching.options import PatchOptions
from normprobe.patching.run import patch
from normprobe.rewrites import AddQKNorm, ScaleResidual
from tests.models import made_in_inference_mode
from tests.patching.checkpoints import IDS, llama, logits, saved


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("there")
    rewrites = [AddQKNorm(), ScaleResidual()]
    return patch(str(saved(llama(), folder / "source")), folder / "out", rewrites, PatchOptions(level=None)).out


def check(model: nn.Module, out: Path) -> None:
    """It computes what the checkpoint says, and every weight gets a gradient."""
    assert [name for name, held in [*model.named_parameters(), *model.named_buffers()] if held.is_inference()] == []
    assert torch.equal(logits(model), logits(normprobe.load(out)))
    model(IDS).logits.square().mean().backward()
    assert [name for name, p in model.named_parameters() if p.grad is None] == []


def test_what_is_loaded_there_can_be_trained(out: Path) -> None:
    with torch.inference_mode():
        model = normprobe.load(out)
    check(model, out)


def test_what_changes_are_put_into_there_can_be_trained(out: Path) -> None:
    model = llama()
    apart = model.lm_head.weight  # in memory that is not aligned, in whose place other comes
    apart.data = torch.empty(apart.numel() + 1)[1:].view(apart.shape)
    with torch.inference_mode():
        normprobe.apply_manifest(model, out)
    check(model, out)


@pytest.mark.parametrize("there", [False, True])
def test_a_model_that_was_made_there_is_filled(out: Path, there: bool) -> None:
    model, _ = made_in_inference_mode((llama(), IDS))
    own = {id(parameter) for parameter in model.parameters()}
    with torch.inference_mode(there):
        normprobe.apply_manifest(model, out)
    assert torch.equal(logits(model), logits(normprobe.load(out)))
    assert {p.is_inference() for p in model.parameters() if id(p) not in own} == {False}
    assert own <= {id(parameter) for parameter in model.parameters()}
