"""A rewrite of a plan as lines of text."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from normprobe.rewrites.base import Rewrite, Site, Sites
from normprobe.rewrites.refusals import reasons_of
from normprobe.rewrites.starred import starred, starred_text

_SHOWN = 3  # lines of one kind in a brief text
_TOLD = ("path", "change", "touched", "added", "gone")


def counted(count: int, what: str) -> str:
    """The number with the word, in its number."""
    return f"{count} {what}{'' if count == 1 else 's'}"


def rows_of(rewrite: Rewrite, found: Sites, brief: bool = False) -> list[str]:
    """What the rewrite will do at each place, what it refuses and what it notes.

    Args:
        rewrite: the rewrite.
        found: its places.
        brief: whether places that differ by numbers of modules alone are one line.
    """
    stated = "" if rewrite.expect is None else f", {rewrite.expect} expected"
    rows = [f"{rewrite.name}, {rewrite.effect_at(found.sites).value}: {rewrite.describe()}"]
    rows.append(f"  {counted(len(found.sites), 'site')}{stated}, {len(found.refused)} refused")
    rows += _together(found.sites) if brief else [row for site in found.sites for row in _site(site)]
    rows += [f"  refused {text}" for text in reasons_of(found.refused, brief)]
    return rows + [f"  note: {note}" for note in found.notes]


def shortened(rows: Sequence[str], brief: bool) -> list[str]:
    """The first rows, and how many more there are."""
    if not brief or len(rows) <= _SHOWN + 1:
        return list(rows)
    return [*rows[:_SHOWN], f"… and {len(rows) - _SHOWN} lines more"]


def values_of(rewrite: Rewrite, found: Sites) -> dict[str, Any]:
    """The same as plain values, place by place."""
    return {
        "rewrite": rewrite.to_dict(),
        "effect": rewrite.effect_at(found.sites).value,
        "sites": [{name: getattr(site, name) for name in _TOLD} for site in found.sites],
        "refused": [{"path": each.path, "why": each.why} for each in found.refused],
        "notes": found.notes,
    }


def _site(site: Site, named: Callable[[str], str] = str, told: Callable[[str], str] = str) -> tuple[str, ...]:
    """The lines of one place, its names as `named` gives them and its change as `told` does."""
    touched, added, gone = (tuple(map(named, names)) for names in (site.touched, site.added, site.gone))
    rows = [f"  {named(site.path)}: {told(site.change)}"]
    rows += [f"    edits {name}" for name in touched] + [f"    adds {name}" for name in added]
    return (*rows, *(f"    drops {name}" for name in gone))


def _together(sites: Sequence[Site]) -> list[str]:
    """The lines of places, those that are equal but for numbers of modules once."""
    alike: dict[tuple[str, ...], list[Site]] = {}
    for site in sites:
        alike.setdefault(_site(site, starred, starred_text), []).append(site)
    rows: list[str] = []
    for found in alike.values():
        if len(found) == 1:
            rows += _site(found[0])
            continue
        first, *more = _site(found[0], starred, starred_text if len({site.change for site in found}) > 1 else str)
        rows += [f"{first} ({len(found)} places)", *more]
    return rows
