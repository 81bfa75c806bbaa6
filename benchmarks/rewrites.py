#!/usr/bin/env python3
"""Every rewrite in every model with known facts: what it does there, and whether all that is promised of it holds.

    python benchmarks/rewrites.py [--only REWRITE …] [--models PATTERN] [--workers 2] [--json FILE] [--no-write]

The models are the small ones of the tests and, where the folder `shared` lies beside the repository, those with facts
that were read by hand. Each rewrite is planned, applied and proven; a deep copy, and a copy with other values that is
rewritten equally and loads the saved state, have to give the same outputs; readers and writers of the rewritten model
are held against it; at last undo has to give the model back bit for bit. A run over all of it writes the table of
docs/rewrites.md. Exit code 1 where something does not hold.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import re
import sys
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from functools import partial
from multiprocessing import get_context
from pathlib import Path

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

os.environ.update({"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "TRANSFORMERS_VERBOSITY": "error"})

import torch

from benchmarks.page import write_section
from benchmarks.rewriting import SETTINGS, Cell, all_tried
from benchmarks.rewriting_table import PAGE, SECTION, TITLE, section
from tests import truth
from tests.faults.architectures import BUILDS


def names() -> list[str]:
    """All models."""
    return [*(f"tests {name}" for name in BUILDS), *truth.entries()]


def cells(name: str, only: Sequence[str]) -> list[Cell] | str:
    """What became of the rewrites in one model; why where it cannot be built or read."""
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    own = name.removeprefix("tests ")
    chosen = [rewrite for rewrite in SETTINGS if not only or rewrite.name in only]
    try:
        return all_tried(name, BUILDS[own] if own != name else partial(truth.build, name), chosen)
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def run(models: Sequence[str], only: Sequence[str], workers: int) -> Iterator[list[Cell]]:
    """The cells of all models, as they come."""
    with get_context("spawn").Pool(workers, maxtasksperchild=20) as pool:
        for name, found in zip(models, pool.imap(partial(cells, only=only), models), strict=True):
            if isinstance(found, str):
                print(f"{name}: not built: {found[:200]}", flush=True)
                continue
            yield found
            print(f"{name}: {sum(cell.said == 'applied' for cell in found)} of {len(found)} applied", flush=True)
            for cell in (cell for cell in found if cell.errors):
                print(f"    {cell.rewrite} {cell.settings or ''}", *cell.errors, sep="\n        ", flush=True)


def main() -> int:
    """Try, print, write."""
    options = _options()
    models = [name for name in names() if re.search(options.models, name)]
    found: list[Cell] = []
    for cells_of_one in run(models, options.only, options.workers):
        found += cells_of_one
        if options.json is not None:
            options.json.write_text(json.dumps([asdict(cell) for cell in found], indent=1))
    text = section(found)
    print(f"\n{text}")
    if not (options.no_write or options.only or options.models):
        write_section(SECTION, TITLE, text, PAGE)
    return 1 if any(cell.said == "error" for cell in found) else 0


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", default=[], help="names of rewrites")
    parser.add_argument("--models", default="", help="regular expression on the names of models")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--json", type=Path, help="file for all outcomes, written as they come")
    parser.add_argument("--no-write", action="store_true", help="leave docs/rewrites.md alone")
    return parser.parse_args()


if __name__ == "__main__":
    raise SystemExit(main())
