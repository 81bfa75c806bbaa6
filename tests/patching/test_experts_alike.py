"""What computes the experts and attention of a patched model is what does so in the class that was patched."""

from __future__ import annotations

from collections.abc import Callable
from itertools import permutations
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, MixtralForCausalLM

import normprobe
from normprobe.patching.options import PatchOptions
from normprobe.patching.run import patch
from normprobe.rewrites import AddQKNorm
from normprobe.targets.quiet import quiet
from tests.patching.checkpoints import logits

FOUND = "_can_set_{}_implementation_cached_value"  # what transformers found out about a class in this process


def opened(way: str, out: Path, **asked: Any) -> Any:
    if way == "load":
        return normprobe.load(out, dtype=torch.bfloat16)
    where = out if way == "code" else out.parent / "source"
    with quiet():
        model = AutoModelForCausalLM.from_pretrained(where, trust_remote_code=way == "code", **asked)
    return normprobe.apply_manifest(model, out) if way == "manifest" else model


@pytest.fixture
def out(tmp_path: Path, source: Callable[[str], Path]) -> Path:
    folder = source("mixtral-bf16")
    return patch(str(folder), tmp_path / "out", [AddQKNorm(start="calibrated")], PatchOptions(level=None)).out


@pytest.mark.parametrize("ways", list(permutations(("load", "code", "manifest"))), ids="-".join)
def test_experts_are_computed_alike_in_any_order(out: Path, ways: tuple[str, ...]) -> None:
    for kind in MixtralForCausalLM.__mro__:
        for what in ("attn", "experts"):
            if FOUND.format(what) in vars(kind):
                delattr(kind, FOUND.format(what))
    models = [opened(way, out) for way in ways]
    assert {model.config._experts_implementation for model in models} == {"grouped_mm"}
    assert {model.config._attn_implementation for model in models} == {"sdpa"}
    assert all(torch.equal(logits(model), logits(models[0])) for model in models)


def test_they_are_set_as_in_the_class_below_and_found_again(out: Path) -> None:
    plain = opened("manifest", out)
    chosen, code = (opened("code", out, experts_implementation=name) for name in ("grouped_mm", "eager"))
    assert (chosen.config._experts_implementation, code.config._experts_implementation) == ("grouped_mm", "eager")
    by_eager = logits(code)
    code.set_experts_implementation("grouped_mm")
    code.set_attn_implementation("eager")
    plain.set_attn_implementation("eager")
    assert (code.config._experts_implementation, code.config._attn_implementation) == ("grouped_mm", "eager")
    assert torch.equal(logits(code), logits(plain))
    assert not torch.equal(logits(chosen), by_eager)
    with quiet():
        chosen.save_pretrained(out.parent / "again")
    again = opened("code", out.parent / "again")
    assert again.config._experts_implementation == "grouped_mm"
    assert torch.equal(logits(again), logits(chosen))
