"""A patch takes no more of the disk than it has to, and too little room is told before anything long is done."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from normprobe.checkpoints.output import Room
from normprobe.checkpoints.staging import part_of
from normprobe.errors import CheckpointError, RewriteError
from normprobe.patching import run
from normprobe.patching.built import Subject
from normprobe.patching.options import PatchOptions
from normprobe.patching.rewriting import foreseen
from normprobe.patching.run import patch
from normprobe.patching.writing import Writing
from normprobe.rewrites import AddQKNorm, FoldGains, Rewrite, SetEps, ToDyT, ToRMSNorm
from normprobe.targets.options import TargetOptions
from tests.patching.checkpoints import gpt2, llama

FAST = PatchOptions(level=None, target=TargetOptions(tokens=8))
SMALL = 100_000  # bytes: blocks that are not full, and what is added to a tiny model
UNFOLDED = ("embed_tokens.weight", "o_proj.weight", "down_proj.weight")
blocks = pytest.mark.skipif(os.name != "posix", reason="no blocks are told")


@pytest.fixture
def large(tmp_path: Path) -> Path:
    """Two megabytes, most of them in tables."""
    llama(vocab_size=8192).save_pretrained(tmp_path / "in")
    return tmp_path / "in"


def size(folder: Path, *without: str) -> int:
    """Bytes of the tensors in a checkpoint."""
    found = {name: each for path in folder.glob("*.safetensors") for name, each in load_file(path).items()}
    return sum(each.nbytes for name, each in found.items() if not name.endswith(without or ("\0",)))


def taken(folder: Path) -> int:
    """Bytes that files have on the disk, holes left out."""
    return sum(path.stat().st_blocks * 512 for path in folder.rglob("*") if path.is_file())


@blocks
@pytest.mark.parametrize(
    ("rewrites", "fold"),
    [([AddQKNorm(start="unit")], False), ([ToDyT(start="unit")], False), ([FoldGains(), AddQKNorm()], True)],
    ids=["qk-norm", "dyt", "fold first"],
)
def test_what_is_laid_out_anew_took_no_room_but_that_of_what_had_changed(
    large: Path, monkeypatch: pytest.MonkeyPatch, rewrites: list[Rewrite], fold: bool
) -> None:
    out, anew, found = large.with_name("out"), Writing._anew, []

    def watched(self: Writing, layout: Mapping[str, Mapping[str, Room]]) -> None:
        found.append(taken(part_of(out)))
        anew(self, layout)
        found.append(taken(part_of(out)))

    monkeypatch.setattr(Writing, "_anew", watched)
    patch(str(large), out, rewrites, FAST)
    before, peak = found
    changed = size(large, *UNFOLDED) if fold else 0
    assert changed <= before <= changed + SMALL
    assert size(out) <= peak - before <= size(out) + SMALL


@blocks
def test_files_that_stay_as_they_are_take_their_room_at_once(large: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out, found = large.with_name("out"), list[int]()
    monkeypatch.setattr(run, "probe", lambda *args, **kwargs: found.append(taken(part_of(out))))
    patch(str(large), out, [FoldGains()], PatchOptions())
    assert size(large) <= found[0] <= size(large) + SMALL


def with_free(monkeypatch: pytest.MonkeyPatch, free: int) -> None:
    usage = type("Usage", (), {"free": free})
    monkeypatch.setattr("normprobe.checkpoints.disk.shutil.disk_usage", lambda folder: usage)


@pytest.mark.parametrize(
    ("model", "rewrites", "needed"),
    [
        (llama, [FoldGains()], lambda folder: (size(folder), 0)),
        (llama, [AddQKNorm(start="unit")], lambda folder: (size(folder), 0)),
        (llama, [FoldGains(), AddQKNorm()], lambda folder: (size(folder), size(folder, *UNFOLDED))),
    ],
    ids=["fold", "qk-norm", "fold first"],
)
def test_too_little_room_is_told_before_anything_long_is_done(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    model: Callable[[], Any],
    rewrites: list[Rewrite],
    needed: Callable[[Path], tuple[int, int]],
) -> None:
    model().save_pretrained(tmp_path / "in")
    files, before = needed(tmp_path / "in")
    monkeypatch.setattr(run, "probe", lambda *args, **kwargs: pytest.fail("it is audited"))
    with_free(monkeypatch, files + before - 1)
    why = f"{files:,} for the new files" + (f", {before:,} for what changes before" if before else "")
    told = rf"no room for the new folder\n  expected: {files + before:,} bytes: {why}"
    with pytest.raises(CheckpointError, match=rf"{told}(.|\n)*found: {files + before - 1:,} bytes free"):
        patch(str(tmp_path / "in"), tmp_path / "out", rewrites, PatchOptions())
    assert [path.name for path in tmp_path.iterdir()] == ["in"]
    with_free(monkeypatch, files + before)
    patch(str(tmp_path / "in"), tmp_path / "out", rewrites, FAST)


def test_a_table_that_is_no_longer_tied_is_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gpt2().save_pretrained(tmp_path / "in")
    found = patch(str(tmp_path / "in"), tmp_path / "out", [ToRMSNorm(tied="untie")], FAST)
    needed = size(found.out)
    assert needed > size(tmp_path / "in")
    with_free(monkeypatch, needed - 1)
    with pytest.raises(CheckpointError, match=rf"no room for the new folder\n.* {needed:,} for the new files"):
        patch(str(tmp_path / "in"), tmp_path / "other", [ToRMSNorm(tied="untie")], FAST)


def test_a_place_that_comes_with_the_rewrite_before_is_no_fault(tmp_path: Path) -> None:
    """The norms on queries and keys that the second sets are not there yet when the disk is looked at."""
    llama().save_pretrained(tmp_path / "in")
    rewrites = [AddQKNorm(start="unit"), SetEps(eps=1e-3, only="*q_norm*")]
    found = patch(str(tmp_path / "in"), tmp_path / "out", rewrites, FAST)
    assert len(found.plans[1].steps[0][1].sites) == 2


@pytest.mark.parametrize(("only", "whole"), [(None, True), ("*q_norm*", False)])
def test_what_comes_with_the_rewrite_before_is_not_foreseen(tmp_path: Path, only: str | None, whole: bool) -> None:
    model = llama()
    inputs = {"input_ids": torch.arange(8)[None]}
    subject = Subject(tmp_path, "in", None, model, {}, None, inputs)
    known = foreseen(subject, [FoldGains(), SetEps(eps=1e-3, **({} if only is None else {"only": only}))])
    assert known.whole is whole


def test_what_has_no_place_is_refused_before_the_audit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    llama().save_pretrained(tmp_path / "in")
    monkeypatch.setattr(run, "probe", lambda *args, **kwargs: pytest.fail("it is audited"))
    with pytest.raises(RewriteError, match="FoldGains found another number of sites"):
        patch(str(tmp_path / "in"), tmp_path / "out", [FoldGains(expect=7)], PatchOptions())
    assert [path.name for path in tmp_path.iterdir()] == ["in"]
