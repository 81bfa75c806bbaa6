"""What `only` is matched against: how a branch is called, and whether a pattern covers any place at all."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches

from normprobe.errors import RewriteError
from normprobe.records import Branch
from normprobe.rewrites.edits import chosen

_SHOWN = 8


def branch_names(branch: Branch) -> tuple[str, ...]:
    """How a branch is called: by the weights that write, by the modules that hold these inside of the one that adds,
    outermost first, and by the one that adds, which other branches may share."""
    inside = "" if branch.path == "." else branch.path + "."
    found: list[str] = []
    for name in branch.writers:
        parts = name.split(".")
        paths = (".".join(parts[:end]) for end in range(1, len(parts) + 1))
        found += [path for path in paths if path.startswith(inside)] if name.startswith(inside) else [name]
    if not inside:  # the root adds: what holds all blocks is no name of one branch
        found.sort(key=lambda path: -path.count("."))
    return tuple(dict.fromkeys([*found, branch.path]))


def check_choice(name: str, only: str | tuple[str, ...], places: Iterable[tuple[str, ...]]) -> None:
    """Refuse a choice with a pattern that covers none of the places that there are; each has several names, the first
    is shown.

    Raises:
        RewriteError: one covers none; names some that there are.
    """
    every = list(places)
    patterns = (only,) if isinstance(only, str) else only
    idle = next((each for each in patterns if not any(chosen(names, each) for names in every)), None)
    if not every or idle is None:
        return
    shown = list(dict.fromkeys(names[0] for names in every))
    more = f", and {len(shown) - _SHOWN} more" if len(shown) > _SHOWN else ""
    near = get_close_matches(idle, [one for names in every for one in names], 1)
    raise RewriteError(
        f"only={idle!r} covers no place of {name}",
        expected=f"a pattern that covers some of {', '.join(shown[:_SHOWN])}{more}",
        found="none",
        hint=f"only={near[0]!r}" if near else None,
    )
