"""A rewrite of a plan as lines of text."""

from __future__ import annotations

from normprobe.rewrites.base import Rewrite, Sites
from normprobe.rewrites.refusals import reasons_of


def counted(count: int, what: str) -> str:
    """The number with the word, in its number."""
    return f"{count} {what}{'' if count == 1 else 's'}"


def rows_of(rewrite: Rewrite, found: Sites) -> list[str]:
    """What the rewrite will do at each place, what it refuses and what it notes."""
    stated = "" if rewrite.expect is None else f", {rewrite.expect} expected"
    rows = [f"{rewrite.name}, {rewrite.effect_at(found.sites).value}: {rewrite.describe()}"]
    rows.append(f"  {counted(len(found.sites), 'site')}{stated}, {len(found.refused)} refused")
    for site in found.sites:
        rows.append(f"  {site.path}: {site.change}")
        rows += [f"    edits {name}" for name in site.touched] + [f"    adds {name}" for name in site.added]
        rows += [f"    drops {name}" for name in site.gone]
    rows += [f"  refused {text}" for text in reasons_of(found.refused)]
    return rows + [f"  note: {note}" for note in found.notes]
