"""Refusals by their reasons: each reason once, with the places that it is for."""

from __future__ import annotations

from collections.abc import Iterable

from normprobe.rewrites.base import Refusal

_NAMED = 3


def reasons_of(refused: Iterable[Refusal]) -> list[str]:
    """A line for each reason, in the order in which they came: "h.0, h.1: …", "48 places (h.0, h.1, h.2, …): …"."""
    places: dict[str, list[str]] = {}
    for each in refused:
        places.setdefault(each.why, []).append(each.path)
    return [f"{_named(tuple(dict.fromkeys(paths)))}: {why}" for why, paths in places.items()]


def _named(paths: tuple[str, ...]) -> str:
    if len(paths) <= _NAMED:
        return ", ".join(paths)
    return f"{len(paths)} places ({', '.join(paths[:_NAMED])}, …)"
