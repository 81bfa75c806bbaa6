#!/usr/bin/env python3
"""Which of transformers' architectures normprobe audits, shown model by model.

    python benchmarks/coverage.py [--kinds KIND …] [--only PATTERN] [--out docs/coverage.md] [--json FILE] [--workers N]

Every model class that transformers registers for a kind is built from a shrunken configuration, run, probed at level
"structure", and the readers and writers of up to three branches of each stream are held against the model itself.
Without `--kinds` and `--only` the table goes to docs/coverage.md.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from pathlib import Path
from typing import Any

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.pool import outcomes
from benchmarks.registry import KINDS, registered
from benchmarks.table import page, table

LIMIT = 60.0  # seconds a model
DOCS = Path(__file__).resolve().parent.parent / "docs" / "coverage.md"


def main() -> int:
    """Try the models, print the table, write the page; exit code 1 where a model crashed."""
    options = _options()
    entries = [e for kind in options.kinds for e in registered(kind) if re.search(options.only, e.name)]
    results: list[dict[str, Any]] = []
    for result in outcomes(entries, options.limit, options.workers):
        results.append(result)
        print(f"{len(results)}/{len(entries)} {result['name']}: {result['outcome']} {result['note']}", flush=True)
        if options.json is not None:
            options.json.write_text(json.dumps(results, indent=1) + "\n")
    print("\n".join(table(results)))
    whole = options.only == "" and options.kinds == list(KINDS)
    out = options.out or (DOCS if whole else None)
    if out is not None:
        import transformers

        out.write_text(page(results, transformers.__version__))
    return 1 if any(result["outcome"] == "crashed" for result in results) else 0


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kinds", nargs="+", choices=list(KINDS), default=list(KINDS))
    parser.add_argument("--only", default="", help="regular expression on kind:model_type:class")
    parser.add_argument("--out", type=Path, help="the page to write")
    parser.add_argument("--json", type=Path, help="file for the outcomes, written as they come")
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--limit", type=float, default=LIMIT, help="seconds a model")
    return parser.parse_args()


if __name__ == "__main__":
    raise SystemExit(main())
