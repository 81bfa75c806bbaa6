"""Killed at any moment, a patch leaves no folder or a whole one, and the next run puts right what it left."""

from __future__ import annotations

import multiprocessing
import os
import random
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from normprobe.checkpoints.staging import backup_of, part_of, recover
from normprobe.patching.options import PatchOptions
from normprobe.patching.run import patch
from normprobe.patching.verify import verify
from normprobe.rewrites import Initialise
from tests.patching.checkpoints import contents

KILLS, ENDED = 50, 9
pytestmark = pytest.mark.skipif(os.name != "posix", reason="needs fork and SIGKILL")


def run(source: Path, out: Path, seed: int, overwrite: bool) -> None:
    torch.set_num_threads(1)
    patch(str(source), out, [Initialise(seed=seed)], PatchOptions(level=None, overwrite=overwrite))


def started(source: Path, out: Path, seed: int, overwrite: bool) -> multiprocessing.context.ForkProcess:
    process = multiprocessing.get_context("fork").Process(target=run, args=(source, out, seed, overwrite))
    process.start()
    return process


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_killed_at_random_moments_there_is_no_folder_or_a_whole_one(
    tmp_path: Path, source: Callable[[str], Path]
) -> None:
    folder, out = source("llama-sharded-bf16"), tmp_path / "out"
    before = contents(folder)
    begin = time.monotonic()
    run(folder, out, 0, overwrite=False)
    took, draw, came_through = time.monotonic() - begin, random.Random(0), 0
    for number in range(1, KILLS + 1):
        old = contents(out)
        process = started(folder, out, number, overwrite=True)
        time.sleep(draw.uniform(0.0, 1.1 * took))
        assert process.pid is not None
        os.kill(process.pid, signal.SIGKILL)
        process.join()
        there = out.exists()
        assert there or backup_of(out).exists()
        recover(out)
        assert not part_of(out).exists()
        assert not backup_of(out).exists()
        assert verify(out).problems == ()
        came_through += contents(out) != old
    assert contents(folder) == before
    assert came_through < KILLS


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
@pytest.mark.parametrize("overwrite", [False, True])
def test_killed_at_each_step_there_is_no_folder_or_a_whole_one(
    tmp_path: Path, source: Callable[[str], Path], overwrite: bool
) -> None:
    """The process ends at the n-th call that a disk would notice, for every n until one run comes through."""
    folder, out = source("llama-sharded-bf16"), tmp_path / "out"
    if overwrite:
        run(folder, out, 0, overwrite=False)
    for number in range(1, 200):
        old = contents(out) if overwrite else None
        process = multiprocessing.get_context("fork").Process(target=ending, args=(number, folder, out, overwrite))
        process.start()
        process.join()
        recover(out)
        assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []
        new = contents(out) if out.exists() else None
        assert new == old or verify(out).problems == ()
        if process.exitcode == 0:
            assert new != old
            break
        assert process.exitcode == ENDED
        if not overwrite:
            shutil.rmtree(out, ignore_errors=True)
    assert 10 < number < 199


def ending(number: int, source: Path, out: Path, overwrite: bool) -> None:
    """Run until the n-th rename, flush or removal, then end as a killed process does."""
    left = number

    def counted(call: Callable[..., object]) -> Callable[..., object]:
        def stepped(*args: object, **kwargs: object) -> object:
            nonlocal left
            left -= 1
            if left == 0:
                os._exit(ENDED)
            return call(*args, **kwargs)

        return stepped

    for name in ("rename", "fsync", "unlink", "rmdir", "mkdir"):
        setattr(os, name, counted(getattr(os, name)))
    run(source, out, number, overwrite)
