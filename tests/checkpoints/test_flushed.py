"""A folder is on the disk before it is in its place, and its name after that."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest
import torch

from normprobe.checkpoints.header import laid_out
from normprobe.checkpoints.shard import ShardWriter
from normprobe.checkpoints.staging import part_of, staged
from normprobe.errors import CheckpointError

pytestmark = pytest.mark.skipif(os.name != "posix", reason="folders are flushed on posix alone")


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    """Flushes and renames as they come, by the number of the file or folder."""
    found: list[tuple[str, int]] = []
    fsync, rename = os.fsync, os.rename

    def flushed(file: int) -> None:
        found.append(("flush", os.fstat(file).st_ino))
        fsync(file)

    def renamed(source: Path, target: Path) -> None:
        found.append(("rename", os.stat(source).st_ino))
        rename(source, target)

    monkeypatch.setattr(os, "fsync", flushed)
    monkeypatch.setattr(os, "rename", renamed)
    return found


def test_everything_is_flushed_before_it_gets_its_name_and_the_name_after(
    tmp_path: Path, steps: list[tuple[str, int]]
) -> None:
    out = tmp_path / "out"
    with staged(out, overwrite=False) as part:
        (part / "sub").mkdir()
        (part / "sub" / "a.txt").write_text("new")
    own, parent = out.stat().st_ino, tmp_path.stat().st_ino
    moved = steps.index(("rename", own))
    inside = {("flush", path.stat().st_ino) for path in (out, *out.rglob("*"))}
    assert set(steps[:moved]) == inside
    assert len(inside) == 3
    assert steps[moved + 1 :] == [("flush", parent)]


def test_a_weight_file_is_flushed_before_it_is_read_back(tmp_path: Path, steps: list[tuple[str, int]]) -> None:
    writer = ShardWriter(tmp_path / "a.safetensors", laid_out({"a": ("F32", (2,), 8)}, {}))
    writer.put("a", torch.ones(2))
    assert steps == []
    writer.finish()
    assert steps == [("flush", (tmp_path / "a.safetensors").stat().st_ino)]


@pytest.mark.parametrize("full", [errno.ENOSPC, errno.EDQUOT])
def test_a_quota_that_is_used_up_is_a_full_disk(tmp_path: Path, full: int) -> None:
    with pytest.raises(CheckpointError, match="the disk is full"), staged(tmp_path / "out", overwrite=False) as part:
        raise OSError(full, os.strerror(full), str(part))
    assert not part_of(tmp_path / "out").exists()
