"""Refusals by their reasons: each reason once, with the places that it is for."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from normprobe.rewrites.base import Refusal
from normprobe.rewrites.starred import starred_text

_NAMED = 3


def reasons_of(refused: Iterable[Refusal], brief: bool = False) -> list[str]:
    """A line for each reason, in the order in which they came: "h.0, h.1: …", "48 places (h.0, h.1, h.2, …): …".

    Args:
        refused: the refusals.
        brief: whether more than a few that differ by numbers of modules alone are one.
    """
    places: dict[str, list[str]] = {}
    for why, found in _alike(refused) if brief else ((each.why, [each]) for each in refused):
        places.setdefault(why, []).extend(each.path for each in found)
    return [f"{_named(tuple(dict.fromkeys(paths)))}: {why}" for why, paths in places.items()]


def told_briefly(refused: Iterable[Refusal]) -> str:
    """The first reasons, and how many more there are, for one line of an error."""
    reasons = reasons_of(refused, brief=True)
    more = [f"and {len(reasons) - _NAMED} reasons more"] if len(reasons) > _NAMED + 1 else []
    return "; ".join([*(reasons[:_NAMED] if more else reasons), *more])


def _alike(refused: Iterable[Refusal]) -> Iterator[tuple[str, list[Refusal]]]:
    groups: dict[str, list[Refusal]] = {}
    for each in refused:
        groups.setdefault(starred_text(each.why), []).append(each)
    for why, found in groups.items():
        if len({each.why for each in found}) > _NAMED:
            yield why, found
        else:
            yield from ((each.why, [each]) for each in found)


def _named(paths: tuple[str, ...]) -> str:
    if len(paths) <= _NAMED:
        return ", ".join(paths)
    return f"{len(paths)} places ({', '.join(paths[:_NAMED])}, …)"
