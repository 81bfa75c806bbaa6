"""The pages of the checks as files: `python -m normprobe.checks.pages FOLDER` writes them, and a table of all."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from itertools import groupby
from pathlib import Path

from normprobe.checks.base import Check
from normprobe.checks.catalogue import ALL, documentation

INDEX = "index.md"
FOLDER = "docs/checks"  # in the repository
_MADE = "<!-- Written by `make docs` from the docstrings of the checks; edit those. -->\n\n"


def page_name(check: Check) -> str:
    """Name of the file that holds the page of `check`."""
    return f"{check.code}.md"


def page_place(check: Check) -> str:
    """Where the repository has the page of `check`."""
    return f"{FOLDER}/{page_name(check)}"


def pages(checks: Iterable[Check] = ALL) -> dict[str, str]:
    """Name and text of every file of the folder.

    Args:
        checks: the checks to write about.

    Returns:
        The page of each check by its code, and `index.md`, a table for each subject.
    """
    ordered = sorted(checks, key=lambda check: check.code)
    texts = {page_name(check): _MADE + documentation(check) for check in ordered}
    return texts | {INDEX: _MADE + "\n".join(_index(ordered)) + "\n"}


def write(folder: Path, checks: Iterable[Check] = ALL) -> None:
    """Writes the pages into `folder`, and removes those of checks that are no more.

    Args:
        folder: made where it does not exist.
        checks: the checks to write about.
    """
    folder.mkdir(parents=True, exist_ok=True)
    texts = pages(checks)
    for path in folder.glob("*.md"):
        if path.name not in texts:
            path.unlink()
    for name, text in texts.items():
        (folder / name).write_text(text, encoding="utf-8", newline="\n")


def _index(checks: list[Check]) -> Iterator[str]:
    yield "# The checks\n"
    yield "The first digit of a code is its subject, never its severity. The severity is the worst that a check raises."
    for subject, group in groupby(checks, key=_subject):
        yield f"\n## {subject}\n"
        yield "| code | name | severity | needs | what it looks for |\n|---|---|---|---|---|"
        for check in group:
            facts = (check.name, check.severity.value, ", ".join(check.needs.words()), check.summary())
            yield f"| [{check.code}]({page_name(check)}) | {' | '.join(facts)} |"


def _subject(check: Check) -> str:
    """What the folder of the check says of itself."""
    folder = sys.modules[type(check).__module__.rpartition(".")[0]]
    return (folder.__doc__ or "").strip().rstrip(".")


if __name__ == "__main__":
    write(Path(sys.argv[1]))
