#!/usr/bin/env python3
"""Which planted faults are found. What is said of models without one is `calibration.py`'s.

    python benchmarks/faults.py [--only CODE …] [--models PATTERN] [--workers 2] [--json FILE] [--no-write]

Every operator of tests/faults is planted in every model that has a place for it: the small ones of the tests and, where
the folder `shared` lies beside the repository, those with facts that were read by hand; faults that hang on the width
are planted in rows of models that a sweep trains. A fault counts as found where
the check raises its code at a place where the untouched model does not, as severe as it has to be, and nothing of that
severity that the fault does not deserve sorts in front. Where the check says that it could not look, and why, the
fault is counted apart. A run over all codes and models writes its table into docs/calibration.md. Exit code 1 where
less than 99 % of the others are found.
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
from typing import Any

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

os.environ.update({"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "TRANSFORMERS_VERBOSITY": "error"})

import torch

from benchmarks.page import write_section
from tests import truth
from tests.faults import widths
from tests.faults.architectures import BUILDS
from tests.faults.operators import ALL
from tests.faults.running import Subject, judged

LEAST = 0.99
PAGE = Path(__file__).resolve().parent.parent / "docs" / "calibration.md"


def names() -> list[str]:
    """All models."""
    swept = (f"widths {name}" for name in widths.BUILDS)
    return [*(f"tests {name}" for name in BUILDS), *swept, *truth.entries()]


def subject(name: str) -> Subject:
    """One of them."""
    own = name.removeprefix("tests ")
    return Subject(name, BUILDS[own] if own != name else lambda: truth.build(name))


def tried(name: str, codes: Sequence[str]) -> list[dict[str, Any]]:
    """What became of every fault that applies to a model; one row `not built` where it cannot be built."""
    _quiet()
    row_of_models = name.removeprefix("widths ")
    if row_of_models != name:
        asked = widths.FAULTS if not codes or widths.CODE in codes else ()
        swept = (widths.judged(row_of_models, fault) for fault in asked)
        return [asdict(outcome) for outcome in swept if outcome is not None]
    found = subject(name)
    try:
        found.anatomy  # noqa: B018
    except Exception as error:
        return [{"model": name, "said": "not built", "detail": f"{type(error).__name__}: {error}"[:200]}]
    faults = [fault for fault in ALL if not codes or fault.code in codes]
    outcomes = (judged(found, fault) for fault in faults)
    return [asdict(outcome) for outcome in outcomes if outcome is not None]


def _quiet() -> None:
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)


def all_tried(models: Sequence[str], codes: Sequence[str], workers: int) -> Iterator[dict[str, Any]]:
    """The rows of all models, as they come."""
    with get_context("spawn").Pool(workers, maxtasksperchild=20) as pool:
        for name, rows in zip(models, pool.imap(partial(tried, codes=codes), models), strict=True):
            yield from rows
            lost = [row for row in rows if row["said"] != "found"]
            print(f"{name}: {len(rows)} faults, {len(rows) - len(lost)} found", flush=True)
            for row in lost:
                place = f" at {row['site']}" if "site" in row else ""
                what = f"{row['code']} {row['fault']!r}" if "code" in row else "model"
                print(f"    {what}{place}: {row['said']}: {row['detail']}", flush=True)


def main() -> int:
    """Plant, probe, print, write."""
    options = _options()
    models = [name for name in names() if re.search(options.models, name)]
    rows = list(all_tried(models, options.only, options.workers))
    if options.json is not None:
        options.json.write_text(json.dumps(rows, indent=1))
    text = section(rows)
    print(f"\n{text}")
    if not (options.no_write or options.only or options.models):
        write_section("faults", "Planted faults", text, PAGE)
    recall = share([row for row in rows if "code" in row])
    return 0 if recall is not None and recall >= LEAST else 1


def share(rows: Sequence[dict[str, Any]]) -> float | None:
    """Of the faults of which the check did not say that it could not look, the share that was found."""
    told = [row for row in rows if row["said"] != "not told"]
    return sum(row["said"] == "found" for row in told) / len(told) if told else None


def section(rows: Sequence[dict[str, Any]]) -> str:
    """The section of the page: how it is counted, one row a check, and what was missed."""
    planted = [row for row in rows if "code" in row]
    models, operators = len({row["model"] for row in planted}), len({row["fault"] for row in planted})
    lines = [
        f"{operators} operators (tests/faults) planted in {models} models, each wherever the Anatomy has a place for "
        "it, at one chosen by a seed. Found: the check raises its code there, as severe as it has to be, and first of "
        "its severity but for codes that the fault deserves as well. Not told: the check says that it could not look, "
        "and why; recall is of the others.",
        "",
        "| check | operators | models | planted | found | not told | recall |",
        "|---|---|---|---|---|---|---|",
    ]
    for code in sorted({row["code"] for row in planted}):
        lines.append(_row(code, [row for row in planted if row["code"] == code]))
    missed = [row for row in planted if row["said"] not in ("found", "not told")]
    places = [f"- {row['code']}, {row['fault']}, in {row['model']} at {row['site']}: {row['said']}" for row in missed]
    return "\n".join([*lines, _row("all", planted), *(["", "Missed:", "", *places] if places else [])])


def _row(title: str, rows: Sequence[dict[str, Any]]) -> str:
    said = [row["said"] for row in rows]
    counts = len({row["fault"] for row in rows}), len({row["model"] for row in rows}), len(rows)
    recall = share(rows)
    told = "–" if recall is None else f"{100 * recall:.1f} %"
    return "| " + " | ".join([title, *map(str, (*counts, said.count("found"), said.count("not told"))), told]) + " |"


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", default=[], help="codes")
    parser.add_argument("--models", default="", help="regular expression on the names of models")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--json", type=Path, help="file for all outcomes")
    parser.add_argument("--no-write", action="store_true", help="leave docs/calibration.md alone")
    return parser.parse_args()


if __name__ == "__main__":
    raise SystemExit(main())
