"""The generated section of docs/rewrites.md."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from benchmarks.rewriting import SETTINGS, Cell
from normprobe.rewrites import Rewrite

PAGE = Path(__file__).resolve().parent.parent / "docs" / "rewrites.md"
SECTION, TITLE = "rewrites", "The rewrites, and where they apply"
REASONS = 3  # most frequent ones that are shown
COLUMNS = ("rewrite", "effect", "what it does", "applied", "refused", "not needed", "does not hold", "max Δ")


def section(cells: Sequence[Cell]) -> str:
    """How it was tried, one row for each setting, and why it was refused."""
    models = len({cell.model for cell in cells})
    head = (
        f"{models} architectures. Refused: some place needs the rewrite, and none can have it. Max Δ: the largest "
        "change of an output over the largest output of the same model, in float32, over all architectures."
    )
    rows = [head, "", "| " + " | ".join(COLUMNS) + " |", "|" + "---|" * len(COLUMNS)]
    rows += [_row(rewrite, of(rewrite, cells)) for rewrite in SETTINGS]
    return "\n".join([*rows, *_reasons(cells), *_errors(cells)])


def of(rewrite: Rewrite, cells: Sequence[Cell]) -> list[Cell]:
    """The cells of one setting."""
    return [cell for cell in cells if cell.rewrite == rewrite.name and written(cell) == label(rewrite)]


def label(rewrite: Rewrite) -> str:
    """The rewrite as it is written in code."""
    return _call(rewrite.name, Cell.settings_of(rewrite))


def written(cell: Cell) -> str:
    """The same of a cell."""
    return _call(cell.rewrite, cell.settings)


def _call(name: str, settings: dict[str, object]) -> str:
    return f"{name}({', '.join(f'{key}={value!r}' for key, value in settings.items())})"


def static(rewrite: Rewrite) -> str:
    """The columns that hang on the sources alone."""
    return f"| `{label(rewrite)}` | {rewrite.effect.value} | {_cell(rewrite.describe())} |"


def _row(rewrite: Rewrite, cells: Sequence[Cell]) -> str:
    said = Counter(cell.said for cell in cells)
    moved = [cell.max_rel for cell in cells if cell.max_rel is not None]
    told = f"{max(moved):.1e}" if moved else "–"
    counts = [str(said[key]) if cells else "–" for key in ("applied", "refused", "not needed", "error")]
    return f"{static(rewrite)} {' | '.join(counts)} | {told} |"


def _reasons(cells: Sequence[Cell]) -> list[str]:
    rows = ["", "Most frequent reasons of refusals, with the number of architectures that have such a place:", ""]
    for rewrite in SETTINGS:
        mine = of(rewrite, cells)
        count = Counter(reason for cell in mine for reason in {general(why) for why in cell.refused})
        if count:
            told = "; ".join(f"{reason} ({number})" for reason, number in count.most_common(REASONS))
            rows.append(f"- `{label(rewrite)}`: {told}")
    return rows


def _errors(cells: Sequence[Cell]) -> list[str]:
    rows = [f"- `{written(cell)}` in {cell.model}: {_cell('; '.join(cell.errors))}" for cell in cells if cell.errors]
    return ["", "What does not hold:", "", *rows] if rows else []


def general(why: str) -> str:
    """A reason without the place and the numbers that it names."""
    words = (("…" if "." in word.strip(".,;:()") or any(c.isdigit() for c in word) else word) for word in why.split())
    return _cell(" ".join(words))


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")
