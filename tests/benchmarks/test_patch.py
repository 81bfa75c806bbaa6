"""The checkpoint that is made to be patched, what is measured of a patch, and the limits."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import patch, patching
from normprobe.checkpoints.opened import opened
from normprobe.patching.verify import verify


def small(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"HIDDEN": 64, "INNER": 96, "VOCABULARY": 128, "HEADS": 4, "SHARD": 100_000}.items():
        monkeypatch.setattr(patching, name, value)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_the_checkpoint_has_its_size_its_shards_and_gains_that_can_be_folded(
    dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small(monkeypatch)
    size = patching.make_checkpoint(tmp_path / "source", 300_000, dtype)
    assert 300_000 <= size < 500_000
    with opened(tmp_path / "source") as found:
        assert found.nbytes == size
        assert len(found.files) > 2
        assert {tensor.dtype for tensor in found.tensors.values()} == {getattr(torch, dtype)}
        gain = found.tensors["model.layers.0.input_layernorm.weight"].float()
        assert 0 < float((gain - 1).abs().mean()) < 0.2


@pytest.mark.parametrize("name", ["FoldGains", "FoldGains, with audits on 32 tokens"])
def test_every_second_of_a_patch_belongs_to_a_stage(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small(monkeypatch)
    patching.make_checkpoint(tmp_path / "source", 200_000, "bfloat16")
    stages = patching.run(name, str(tmp_path / "source"), str(tmp_path / "out"))["stages"]
    once = {"imports", "load", name.split(",")[0], "write", "proof", "check"}
    assert stages.keys() == once | ({"audit"} if "audits" in name else set())
    assert verify(tmp_path / "out").problems == ()


@pytest.mark.skipif(sys.platform != "linux", reason="the system does not say")
def test_memory_is_that_which_no_file_holds() -> None:
    code = "held = bytearray(60_000_000); held[::4096] = held[::4096].replace(b'\\0', b'1'); print(1); input()"
    process = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stdin is not None
    process.stdout.readline()
    assert 60_000_000 < patch.anonymous(process.pid) < 100_000_000
    process.communicate(b"\n")
    assert patch.anonymous(process.pid) == 0


def found(**more: Any) -> dict[str, Any]:
    return {
        "name": "A",
        "copying": 10.0,
        "seconds": 20.0,
        "busy": 30.0,
        "taken": 0.5,
        "memory": 1.2,
        "bare": 0.3,
        "stages": {},
        **more,
    }


@pytest.mark.parametrize(
    ("result", "holds"),
    [
        (found(name="FoldGains"), True),
        (found(name="Initialise", seconds=25.1), False),
        (found(name="FoldGains", copying=7.9), False),
        (found(name="FoldGains, with audits on 32 tokens", copying=7.9), True),
        (found(memory=1.31), False),
    ],
)
def test_limits(result: dict[str, Any], holds: bool) -> None:
    assert patch.holds(result) is holds


def test_the_table_has_a_row_for_each_case() -> None:
    told = patch.table([found(stages={"load": 1.23, "check": 0.04}), found(name="B")], 8 * 10**9, "bfloat16")
    assert "8.0 GB in bfloat16" in told
    assert f"{os.cpu_count()} processors" in told
    assert "| A | 10.0 | 20.0 | 30.0 | 50% | 2.00 | 0.90 | load 1.2 |" in told
    assert "| B |" in told
