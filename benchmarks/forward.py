#!/usr/bin/env python3
"""What the measured pass costs beside a bare forward, what others cost that watch one, and whether they agree.

    python benchmarks/forward.py [--tokens 512 1536] [--repeats 15] [--only NAME] [--no-write]

SmolLM2-135M in float32, batch 1, no cache on either side, two threads. Each row runs in a fresh interpreter that holds
two copies of the model, one bare and one watched: their forwards take turns, the ratio is the median over the pairs,
and the extra memory is the peak of a watched forward over that of a bare one, the median of three pairs. Numbers that
a peer tells too are compared with normprobe's, over all rows; a difference ends the run.

Peers that are not installed are left out. They are no dependencies of the project:
`pip install --no-deps transformer-lens==4.3.0 nnsight`, and of what these two need einops, jaxtyping, wadler-lindig,
beartype, typeguard, fancy-einsum, datasets, pandas, pyarrow, dill, multiprocess, xxhash, python-dateutil, six,
greenlet, cloudpickle, websocket-client, zstandard, httpx and httpcore in the same way. The table goes into
docs/performance.md. Exit code 1 where a limit is missed.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import math
import statistics
import subprocess
import sys
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.page import write_section
from benchmarks.peers import NORMPROBE, WATCHERS, Watcher, normprobe_numbers, normprobe_signal
from benchmarks.quiet import Ratio, quiet_turns
from benchmarks.smollm import THREADS, environment, load, token_ids

MOST_RATIO, MOST_EXTRA = 1.10, {512: 30.0, 1536: 60.0}  # of residual streams and attention; MB
PEAKS = 3  # pairs of a bare and a watched forward whose peaks are compared
AGREED_TOKENS = 256
ROUNDING = 1e-6  # of shares and entropies, which lie in [0, 1]; relative tolerances come on top


class Cell(NamedTuple):
    """Times of a bare and a watched forward, and the extra peak memory of the watched one in MB."""

    ratio: Ratio
    extra: float


Rows = dict[str, dict[int, Cell]]  # watcher -> tokens -> what was measured


def measure(watcher: Watcher, tokens: int, repeats: int) -> Cell:
    """Bare and watched forwards in this interpreter."""
    import torch

    torch.set_num_threads(THREADS)
    model, watched_model = load(), load()
    ids = token_ids(tokens)

    def bare() -> None:
        model(input_ids=ids, use_cache=False)

    with torch.no_grad():
        watched = watcher.attach(watched_model, ids)
        for run in (bare, watched):  # both are warm from here on
            run()
        extra = statistics.median(-peak(bare) + peak(watched) for _ in range(PEAKS))
        return Cell(Ratio.of(quiet_turns(bare, watched, repeats)), extra)


def peak(run: Callable[[], Any]) -> float:
    """Peak resident memory in MB while `run` runs (Linux with glibc).

    What the heap holds from earlier is handed back first, else `run` would use it for nothing; then the kernel's mark
    is set back.
    """
    gc.collect()
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")
    run()
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1e3 for line in lines if line.startswith("VmHWM"))


def agree(watcher: Watcher) -> list[str]:
    """Names of the numbers that a peer and normprobe both tell, which are the same.

    Raises:
        SystemExit: one is not.
    """
    import torch

    ids = token_ids(AGREED_TOKENS)
    with torch.no_grad():
        theirs = watcher.numbers(watcher.attach(load(), ids)())
        ours = normprobe_numbers(normprobe_signal(load(), ids, exact=True)()) if theirs else {}
    wrong = differences(ours, theirs, watcher.tolerance)
    if wrong:
        raise SystemExit("numbers differ from a peer's: " + "; ".join(wrong))
    return list(theirs)


def differences(ours: Mapping[str, Any], theirs: Mapping[str, Any], tolerance: float) -> list[str]:
    """Where numbers of the same name differ; a peer may tell of fewer layers, the first ones."""
    found = []
    for name, values in theirs.items():
        same = ours[name][: len(values)]
        off = (values - same).abs() - (ROUNDING + tolerance * same.abs())
        if len(values) == 0 or not bool((off <= 0).all()):
            found.append(f"{name}: {same.flatten().tolist()} against {values.flatten().tolist()}")
    return found


def in_subprocess(name: str, *options: str) -> Any:
    """The answer of this program about one watcher, from a fresh interpreter."""
    command = [sys.executable, str(Path(__file__).resolve()), "--one", name, *options]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, env=environment())
    return json.loads(done.stdout.strip().splitlines()[-1])


def misses(rows: Rows) -> list[str]:
    """The limits that are not kept."""
    found = []
    for tokens, (ratio, extra) in rows.get(NORMPROBE, {}).items():
        if not ratio.median <= MOST_RATIO:
            found.append(f"{tokens} tokens: {ratio.median:.3f} times the bare forward")
        if not extra <= MOST_EXTRA.get(tokens, math.inf):
            found.append(f"{tokens} tokens: {extra:.0f} MB more than the bare forward")
    return found


def section(rows: Rows, agreed: Mapping[str, list[str]], repeats: int) -> str:
    """The section of the page."""
    import torch
    import transformers

    lengths = list(next(iter(rows.values())))
    head = " | ".join(f"ratio {n} (quartiles) | extra peak {n}, MB" for n in lengths)
    table = [f"| watched by | {head} | equal to normprobe's |", "| --- |" + " ---: | ---: |" * len(lengths) + " --- |"]
    for name, cells in rows.items():
        told = " | ".join(f"{ratio} | {extra:.0f}" for ratio, extra in cells.values())
        table.append(f"| {name} | {told} | {', '.join(f'`{n}`' for n in agreed.get(name, []))} |")
    bare = ", ".join(f"{cell.ratio.plain:.2f} s for {n} tokens" for n, cell in rows[next(iter(rows))].items())
    taken = max(cell.ratio.taken for cells in rows.values() for cell in cells.values())
    how = (
        f"SmolLM2-135M, float32, batch 1, no cache, {THREADS} threads, medians of {repeats} pairs of a bare and a "
        f"watched forward on two copies of the model in one interpreter (a bare one takes {bare}; other processes took "
        f"at most {taken:.0%} of the processors). The last column names the numbers that were compared with "
        "normprobe's over all rows and are the same. "
        f"torch {torch.__version__}, transformers {transformers.__version__}."
    )
    extra = " and ".join(f"{most:g} MB at {tokens}" for tokens, most in MOST_EXTRA.items())
    limits = f"Limits for {NORMPROBE}: ratio at most {MOST_RATIO:.2f}, extra peak at most {extra} tokens."
    missed = [f"- missed: {text}" for text in misses(rows)]
    return "\n".join([how, "", *table, "", limits, *([""] if missed else []), *missed])


def main() -> int:
    """Measure, print, write."""
    options = _options()
    if options.one:
        watcher = WATCHERS[options.one]
        print(json.dumps(agree(watcher) if options.agree else measure(watcher, options.tokens[0], options.repeats)))
        return 0
    names = [name for name, watcher in WATCHERS.items() if options.only in name and find_spec(watcher.package)]
    agreed = {name: in_subprocess(name, "--agree") for name in names}
    rows: Rows = {name: {} for name in names}
    for name in names:
        for n in options.tokens:
            ratio, extra = in_subprocess(name, "--tokens", str(n), "--repeats", str(options.repeats))
            rows[name][n] = Cell(Ratio(*ratio), extra)
            print(f"{name}, {n} tokens: {rows[name][n]}", file=sys.stderr, flush=True)
    text = section(rows, agreed, options.repeats)
    print(text)
    if not options.no_write and not options.only:
        write_section("forward", "The measured pass", text)
    return 1 if misses(rows) else 0


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, nargs="+", default=[512, 1536])
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--only", default="", help="part of a watcher's name")
    parser.add_argument("--no-write", action="store_true", help="leave docs/performance.md alone")
    parser.add_argument("--one", choices=list(WATCHERS), help=argparse.SUPPRESS)
    parser.add_argument("--agree", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args()


if __name__ == "__main__":
    raise SystemExit(main())
