#!/usr/bin/env python3
"""What it costs to read the structure of very large and very deep models on the meta device.

    python benchmarks/structure.py [--only NAME] [--repeats 3] [--profile NAME] [--no-write]

Each model is built from a configuration without weights, run once bare and probed at level "structure", each time in a
fresh interpreter; the medians go into docs/performance.md between the markers. Exit code 1 where a limit is missed.
"""

from __future__ import annotations

import argparse
import cProfile
import json
import os
import pstats
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.page import write_section

TOKENS = 128
MOST_RATIO, MOST_GROWTH, MOST_MEMORY = 3.0, 2.3, 1.5  # times bare forward and building; 1000 / 500 blocks; GB
CASES = {
    "Llama-3.1-405B": (
        "LlamaForCausalLM",
        dict(
            vocab_size=128256,
            hidden_size=16384,
            intermediate_size=53248,
            num_hidden_layers=126,
            num_attention_heads=128,
            num_key_value_heads=8,
            max_position_embeddings=131072,
        ),
    ),
    "DeepSeek-V3": (
        "DeepseekV3ForCausalLM",
        dict(hidden_size=7168, num_hidden_layers=61, n_routed_experts=256, num_experts_per_tok=8),
    ),
    "GPT-2, 1000 blocks": ("GPT2LMHeadModel", dict(n_layer=1000, n_embd=64, n_head=4, vocab_size=256)),
    "GPT-2, 500 blocks": ("GPT2LMHeadModel", dict(n_layer=500, n_embd=64, n_head=4, vocab_size=256)),
}


def measure(name: str, profile: bool = False) -> dict[str, Any]:
    """Build, run and probe one case in this interpreter; seconds, and peak memory in GB with all imports."""
    import torch

    import normprobe

    torch.set_num_threads(1)
    model, building = _build(name)
    ids = torch.zeros(1, TOKENS, dtype=torch.long, device="meta")
    with answered():
        experts = run_on_meta(model, ids)
        started = time.perf_counter()
        _forward(model, ids)
        bare = time.perf_counter() - started
    profiler = cProfile.Profile()
    started = time.perf_counter()
    if profile:
        profiler.enable()
    anatomy = normprobe.probe(model, {"input_ids": ids}, level="structure").anatomy
    profiler.disable()
    probing = time.perf_counter() - started
    if profile:
        pstats.Stats(profiler).sort_stats("tottime").print_stats(25)
        pstats.Stats(profiler).sort_stats("cumtime").print_stats("normprobe", 40)
    found = {"building": building, "bare": bare, "probe": probing, "memory": _peak(), "experts": experts}
    return found | {"blocks": sum(stream.depth for stream in anatomy.streams), "norms": len(anatomy.norms)}


def _build(name: str) -> tuple[Any, float]:
    """The model of a case on meta, in bfloat16, and the seconds it took."""
    import torch
    import transformers

    class_name, fields = CASES[name]
    build_class = getattr(transformers, class_name)
    config = build_class.config_class(**fields)
    started = time.perf_counter()
    with torch.device("meta"):
        model = build_class(config).to(torch.bfloat16).eval()
    return model, time.perf_counter() - started


@contextmanager
def answered() -> Iterator[None]:
    """Let the meta device answer reads of values with one or true, as some models read a mask before its use.

    The kernel of torch is put back. It costs nothing for other operations, unlike a mode around the forward.
    """
    import torch

    library = torch.library.Library("aten", "IMPL")  # type: ignore[no-untyped-call]
    library.impl("_local_scalar_dense", _one, "Meta", allow_override=True)  # type: ignore[no-untyped-call]
    try:
        yield
    finally:
        library._destroy()  # type: ignore[no-untyped-call]


def _one(tensor: Any) -> bool | int | float:
    import torch

    if tensor.dtype is torch.bool:
        return True
    return 1.0 if tensor.dtype.is_floating_point else 1


def run_on_meta(model: Any, ids: Any) -> str:
    """Run once, with the first experts implementation of those that transformers offers that works on meta; its name.

    Raises:
        RuntimeError: none does.
    """
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    reasons = []
    for name in ("", *ALL_EXPERTS_FUNCTIONS.valid_keys(), "eager"):
        try:
            if name:
                model.set_experts_implementation(name)
            _forward(model, ids)
            return str(name)
        except Exception as error:
            reasons.append(f"{name or 'default'}: {type(error).__name__}: {error}")
    raise RuntimeError("no experts implementation runs on meta: " + " | ".join(reasons))


def _forward(model: Any, ids: Any) -> None:
    import torch

    with torch.no_grad():
        model(input_ids=ids, use_cache=False)


def _peak() -> float:
    scale = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * scale / 1e9


def in_subprocess(name: str, profile: bool = False) -> dict[str, Any]:
    """`measure` in a fresh interpreter."""
    command = [sys.executable, str(Path(__file__).resolve()), "--one", name, *(["--profiled"] if profile else [])]
    done = subprocess.run(command, check=True, capture_output=True, text=True, env=_environment())
    *before, last = done.stdout.strip().splitlines()
    if profile:
        print("\n".join(before))
    found: dict[str, Any] = json.loads(last)
    return found


def _environment() -> dict[str, str]:
    """One thread, no network, and modules that keep their bytecode, as those of an installed package do."""
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    return kept | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}


def medians(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """Medians of the numbers of several runs, with the ratio of each run's own times."""
    found: dict[str, Any] = dict(runs[0])
    for key in ("building", "bare", "probe", "memory"):
        found[key] = statistics.median(run[key] for run in runs)
    found["ratio"] = statistics.median(run["probe"] / (run["bare"] + run["building"]) for run in runs)
    return found


def growth(results: dict[str, dict[str, Any]]) -> float | None:
    """Time of probing 1000 blocks over that of 500."""
    deep, half = results.get("GPT-2, 1000 blocks"), results.get("GPT-2, 500 blocks")
    return None if deep is None or half is None else deep["probe"] / half["probe"]


def misses(results: dict[str, dict[str, Any]]) -> list[str]:
    """The limits that are not kept."""
    found = []
    for name, row in results.items():
        if not row["ratio"] <= MOST_RATIO:
            found.append(f"{name}: probe takes {row['ratio']:.1f} times the bare forward and building")
        if not row["memory"] < MOST_MEMORY:
            found.append(f"{name}: peak memory {row['memory']:.2f} GB")
    times = growth(results)
    if times is not None and not times <= MOST_GROWTH:
        found.append(f"1000 blocks take {times:.2f} times as long as 500")
    return found


def section(results: dict[str, dict[str, Any]], repeats: int) -> str:
    """The section of the page: the table, the limits, what was missed."""
    import torch
    import transformers

    rows = [
        "| model | stream writes | building, s | bare forward, s | probe, s | probe / (building + bare) | peak, GB |",
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for name, row in results.items():
        label = name + (f" (experts: {row['experts']})" if row["experts"] else "")
        times = f"{row['building']:.2f} | {row['bare']:.2f} | {row['probe']:.2f} | {row['ratio']:.2f}"
        rows.append(f"| {label} | {row['blocks']} | {times} | {row['memory']:.2f} |")
    growing = growth(results)
    limits = f"Limits: ratio at most {MOST_RATIO:g}, peak below {MOST_MEMORY:g} GB, "
    limits += f"1000 against 500 blocks at most {MOST_GROWTH:g}"
    limits += f" (found: {growing:.2f})." if growing is not None else "."
    how = (
        f"On the meta device, bfloat16, {TOKENS} tokens, one thread, medians of {repeats} fresh interpreters with "
        "bytecode; the bare forward is the second one, the peak includes all imports. "
        f"torch {torch.__version__}, transformers {transformers.__version__}."
    )
    missed = misses(results)
    return "\n".join([how, "", *rows, "", limits, *([""] if missed else []), *(f"- missed: {m}" for m in missed)])


def main() -> int:
    """Measure, print, write."""
    options = _options()
    if options.one:
        print(json.dumps(measure(options.one, options.profiled)))
        return 0
    if options.profile:
        print(in_subprocess(options.profile, profile=True))
        return 0
    names = [name for name in CASES if options.only in name]
    subprocess.run(
        [sys.executable, "-c", "import normprobe.probing"],
        check=True,
        env=_environment(),
        cwd=Path(__file__).parent.parent,
    )
    results = {name: medians([in_subprocess(name) for _ in range(options.repeats)]) for name in names}
    text = section(results, options.repeats)
    print(text)
    if not options.no_write and not options.only:
        write_section("structure", "Structure", text)
    return 1 if misses(results) else 0


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="part of a model's name")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--profile", choices=list(CASES), help="print where one probe spends its time")
    parser.add_argument("--no-write", action="store_true", help="leave docs/performance.md alone")
    parser.add_argument("--one", choices=list(CASES), help=argparse.SUPPRESS)
    parser.add_argument("--profiled", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args()


if __name__ == "__main__":
    raise SystemExit(main())
