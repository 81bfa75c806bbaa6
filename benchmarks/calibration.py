#!/usr/bin/env python3
"""How far healthy models are from the limits of the checks, and what the checks say of them all the same.

    python benchmarks/calibration.py [--only CODE] [--models PATTERN] [--reports FOLDER] [--workers N] [--write]

Trained models, the demo, deep ones, all classes that transformers registers (small), and the models of the folder
`../shared/truth` where it is there, are probed with gradients and an optimiser. For each limit of each check it is
looked for where the limit would have to lie for the check to speak. Exit code 1: a model crashed, a check has an error
on a model without a planted fault, or a warning that `benchmarks/reasons.py` gives no reason for (or a reason of
there fits nothing). A run over all models writes docs/calibration.md.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.findings import problems, said_table
from benchmarks.healthy import GROUPS, Healthy, entries
from benchmarks.page import write_section
from benchmarks.pool import outcomes
from benchmarks.turns_table import models_text, turns_table

LIMIT = 900.0  # seconds a model
PAGE = Path(__file__).resolve().parent.parent / "docs" / "calibration.md"
SUBJECTS = {
    "1": "Norms",
    "2": "Placement and declarations",
    "3": "Signal",
    "4": "Attention",
    "5": "Gradients",
    "6": "Initialisation",
    "7": "Batch norm",
    "8": "Reparametrised and norm-free",
}


def main() -> int:
    """Probe the models, print the tables, write the page."""
    options = _options()
    chosen = [e for group in GROUPS for e in entries(group) if re.search(options.models, e.name)]
    results = _results(chosen, options)
    whole = not options.models and not options.only
    sections = _sections(results, options.only)
    for title, text in sections.items():
        print(f"\n## {title}\n\n{text}")
    if whole:
        missing = [group for group in GROUPS if not any(e.group == group for e in chosen)]
        for title, text in sections.items() if not missing else ():
            write_section(f"calibration {title.lower()}", title, text, PAGE)
        if missing:
            print(f"the page is not written: no models of {', '.join(missing)} are here", file=sys.stderr)
    wrong = problems(results, whole)
    print("\n".join(wrong), file=sys.stderr)
    return 1 if wrong else 0


def _results(chosen: Sequence[Healthy], options: argparse.Namespace) -> list[dict[str, Any]]:
    command = [sys.executable, "-m", "benchmarks.calibrating"]
    if options.reports is not None:
        options.reports.mkdir(parents=True, exist_ok=True)
        command.append(str(options.reports.resolve()))
    results = []
    for one in outcomes(chosen, LIMIT, options.workers, command):
        results.append(one)
        said = " ".join(f"{f['code']}:{f['severity'][0]}" for f in one.get("findings", ()))
        print(f"{len(results)}/{len(chosen)} {one['name']}: {one['outcome']} {one['note'] or said}", flush=True)
    return results


def _sections(results: Sequence[dict[str, Any]], only: str) -> dict[str, str]:
    """The text of each section of the page."""
    probed = [one for one in results if one["outcome"] == "probed"]
    found = {"Models": models_text(results)}
    for digit, title in SUBJECTS.items():
        code = f"NP{digit}"
        parts = [table(probed, code, only) for table in (turns_table, said_table)]
        text = "\n\n".join(part for part in parts if part)
        if text:
            found[title] = text
    return found


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", metavar="CODE", help="one check, or all whose code begins so (NP3)")
    parser.add_argument("--models", default="", metavar="PATTERN", help="regular expression on group:model")
    parser.add_argument("--reports", type=Path, help="folder of reports: those there are judged anew, others kept")
    parser.add_argument("--workers", type=int, default=2)
    return parser.parse_args()


if __name__ == "__main__":
    raise SystemExit(main())
