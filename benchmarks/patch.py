#!/usr/bin/env python3
"""What it costs to patch a large checkpoint: time beside a copy of the same files, and memory of its own.

    python benchmarks/patch.py [--size 8] [--dtype bfloat16] [--only CASE] [--folder DIR] [--no-write]

A sharded checkpoint with the layer sizes of Llama 2 7B is made on the spot. For each case its files are copied, then
patched in a fresh interpreter, whose anonymous memory is looked at every 10 ms. The table goes into docs/performance.md
between its markers. Exit code 1 where a limit is missed. Three times the size is needed on the disk.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.page import write_section
from benchmarks.patching import CASES, TIMED, make_checkpoint
from benchmarks.quiet import machine_seconds

MOST_RATIO, MOST_MEMORY = 2.5, 1.0  # times a copy; GB over the interpreter
GB = 1e9
REST = 15.0  # seconds
EVERY = 0.01  # seconds between two looks at the memory


def main() -> int:
    """Make the checkpoint, run the cases, print the table, write the page."""
    options = _options()
    with tempfile.TemporaryDirectory(dir=options.folder) as place:
        source = Path(place) / "source"
        print(f"making {options.size:g} GB in {source}", flush=True)
        size = make_checkpoint(source, int(options.size * GB), options.dtype)
        bare = watched(["bare"])
        results = []
        for name in CASES:
            if options.only in name:
                results.append(_case(name, source) | {"name": name, "bare": bare["memory"]})
                print(json.dumps(results[-1]), flush=True)
    text = table(results, size, options.dtype)
    print(text)
    if options.write and not options.only:
        write_section("patch", "Patching", text)
    return 0 if all(map(holds, results)) else 1


def _case(name: str, source: Path) -> dict[str, Any]:
    """Copy, then patch; what is written is removed at once. Both find memory as it is on a machine that was idle."""
    copy, out = source.with_name("copy"), source.with_name("out")
    rested(source)
    copying = copied(source, copy)
    shutil.rmtree(copy)
    rested(source)
    found = watched(["patch", name, str(source), str(out)])
    shutil.rmtree(out)
    return {"copying": copying, **found}


def rested(source: Path) -> None:
    """Wait until a virtual machine has handed back to its host what was freed, which it gets anew page by page; then
    have the source in memory."""
    os.sync()
    time.sleep(REST)
    cached(source)


def cached(folder: Path) -> None:
    """Have the files of a folder in memory; a system may have taken them back that was short of it, or idle."""
    for path in folder.iterdir():
        with path.open("rb", buffering=0) as stream:
            while stream.read(1 << 24):
                pass


def copied(source: Path, out: Path) -> float:
    """Seconds to copy a folder until the disk has it, and nothing that it had still to write before."""
    os.sync()
    started = time.perf_counter()
    shutil.copytree(source, out)
    for path in (*out.iterdir(), out):
        descriptor = os.open(path, os.O_RDONLY)
        os.fsync(descriptor)
        os.close(descriptor)
    return time.perf_counter() - started


def watched(words: Sequence[str]) -> dict[str, Any]:
    """Run `benchmarks.patching` in an interpreter of its own: what it says, its seconds, those of a
    processor, its peak of memory in GB."""
    started = time.perf_counter()
    command = [sys.executable, "-m", "benchmarks.patching", *words]
    root = Path(__file__).resolve().parent.parent
    before, all_before = resource.getrusage(resource.RUSAGE_CHILDREN), machine_seconds()
    process = subprocess.Popen(command, stdout=subprocess.PIPE, cwd=root, text=True)
    peak = 0
    while process.poll() is None:
        peak = max(peak, anonymous(process.pid))
        time.sleep(EVERY)
    seconds = time.perf_counter() - started
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    all_busy = machine_seconds() - all_before
    told, _ = process.communicate()
    if process.returncode:
        raise SystemExit(f"{' '.join(command)} failed with {process.returncode}")
    busy = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    taken = max(0.0, all_busy - busy) / (seconds * (os.cpu_count() or 1))
    return {**json.loads(told or "{}"), "seconds": seconds, "busy": busy, "taken": taken, "memory": peak / GB}


def anonymous(pid: int) -> int:
    """Bytes of memory of a process that no file holds."""
    try:
        rows = Path(f"/proc/{pid}/status").read_text(encoding="ascii").splitlines()
    except OSError:  # it has ended
        return 0
    return next((int(row.split()[1]) * 1024 for row in rows if row.startswith("RssAnon")), 0)


def holds(result: dict[str, Any]) -> bool:
    """Whether a case is within its limits."""
    late = result["name"] in TIMED and _ratio(result) > MOST_RATIO
    return not late and result["memory"] - result["bare"] <= MOST_MEMORY


def _ratio(result: dict[str, Any]) -> float:
    return float(result["seconds"] / result["copying"])


def table(results: Sequence[dict[str, Any]], size: int, dtype: str) -> str:
    """The section of the page."""
    import torch
    import transformers

    rows = [
        f"A Llama of {size / GB:.1f} GB in {dtype}, hidden 4096, in shards of 2 GB, made on the spot and in the page"
        f" cache, on {os.cpu_count()} processors. Copying ends when the disk has the files, patching with the process,"
        " whose start and imports are included. Seconds of a processor are those of the patch over all its threads;"
        " others took their share of all processors meanwhile. Memory is the peak of RssAnon over an interpreter"
        " with all imports alone."
        f" torch {torch.__version__}, transformers {transformers.__version__}.",
        "",
        "| patch | copying, s | patching, s | of a processor | others | ratio | memory, GB | where the seconds go |",
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: | --- |",
    ]
    for each in results:
        stages = ", ".join(f"{name} {seconds:.1f}" for name, seconds in each["stages"].items() if seconds >= 0.1)
        memory = each["memory"] - each["bare"]
        seconds = " | ".join(f"{each[name]:.1f}" for name in ("copying", "seconds", "busy"))
        rows.append(
            f"| {each['name']} | {seconds} | {each['taken']:.0%} | {_ratio(each):.2f} | {memory:.2f} | {stages} |"
        )
    timed = " and ".join(TIMED)
    limits = f"Limits: ratio at most {MOST_RATIO} for {timed} without audits, memory at most {MOST_MEMORY:g} GB."
    return "\n".join([*rows, "", limits])


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", type=float, default=8.0, help="GB of weights")
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float16", "float32"])
    parser.add_argument("--only", default="", metavar="CASE", help="cases with this in their name")
    parser.add_argument("--folder", type=Path, help="where the checkpoints are made; else among temporary files")
    parser.add_argument("--no-write", dest="write", action="store_false", help="leave docs/performance.md as it is")
    return parser.parse_args()


if __name__ == "__main__":
    raise SystemExit(main())
