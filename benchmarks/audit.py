#!/usr/bin/env python3
"""What a whole `normprobe audit` takes beside a script that loads the model and runs it once.

    python benchmarks/audit.py [--tokens 512] [--repeats 9] [--profile] [--no-write]

Both load SmolLM2-135M from its GGUF file in a fresh interpreter with two threads, the script through transformers with
one forward without gradients and cache. They take turns; the ratio of their wall times, imports and loading included,
is the median over the pairs. The result goes into docs/performance.md. Exit code 1 where the limit is missed.
"""

from __future__ import annotations

import argparse
import shlex
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.page import write_section
from benchmarks.quiet import Ratio, quiet_turns
from benchmarks.smollm import THREADS, checkpoint, environment

ROOT = Path(__file__).resolve().parent.parent
MOST_RATIO = 2.0
SCRIPT = """
import sys
import torch
from transformers import AutoModelForCausalLM
folder, name, tokens = sys.argv[1:]
model = AutoModelForCausalLM.from_pretrained(folder, gguf_file=name, dtype=torch.float32).eval()
with torch.no_grad():
    model(input_ids=torch.arange(int(tokens))[None], use_cache=False)
"""


def bare(tokens: int) -> list[str]:
    """The command that imports, loads and runs one forward."""
    file = checkpoint()
    return [sys.executable, "-c", SCRIPT, str(file.parent), file.name, str(tokens)]


def audit(tokens: int, *before: str) -> list[str]:
    """The command that audits; `before` are options of the interpreter."""
    return [sys.executable, *before, "-m", "normprobe", "audit", str(checkpoint()), "--tokens", str(tokens)]


def run(command: Sequence[str], output: int | None = subprocess.DEVNULL) -> None:
    """Run to its end; findings (exit code 1) are no failure."""
    done = subprocess.run(command, env=environment(), cwd=ROOT, stdout=output, stderr=output, check=False)
    if done.returncode not in (0, 1):
        raise SystemExit(f"exit code {done.returncode}: {shlex.join(command)}")


def section(ratio: Ratio, tokens: int, repeats: int) -> str:
    """The section of the page."""
    missed = not ratio.median <= MOST_RATIO
    found = (
        f"`normprobe audit` of SmolLM2-135M (GGUF, read as float32) at {tokens} tokens takes **{ratio.median:.2f}** "
        f"(quartiles {ratio.low:.2f}–{ratio.high:.2f}) times as long as a script that imports torch and transformers, "
        f"loads the same file and runs one forward ({ratio.plain:.1f} s): medians of {repeats} pairs of fresh "
        f"interpreters, {THREADS} threads; other processes took at most {ratio.taken:.0%} of the processors."
    )
    limit = f"Limit: {MOST_RATIO:g} times" + (" (missed)." if missed else ".")
    return f"{found}\n\n{limit}"


def main() -> int:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--profile", action="store_true", help="print where one audit spends its time")
    parser.add_argument("--no-write", action="store_true", help="leave docs/performance.md alone")
    options = parser.parse_args()
    if options.profile:
        run(audit(options.tokens, "-m", "cProfile", "-s", "cumtime"), output=None)
        return 0
    commands = bare(options.tokens), audit(options.tokens)
    for command in commands:  # files and bytecode are in memory afterwards
        run(command)
    ratio = Ratio.of(quiet_turns(lambda: run(commands[0]), lambda: run(commands[1]), options.repeats))
    text = section(ratio, options.tokens, options.repeats)
    print(text)
    if not options.no_write:
        write_section("audit", "A whole audit", text)
    return 0 if ratio.median <= MOST_RATIO else 1


if __name__ == "__main__":
    raise SystemExit(main())
