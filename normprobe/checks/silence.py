"""Places at which checks are told to be silent, and what is left of a finding where some of its places are."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, TypeAlias, TypeVar

from normprobe.checks.base import Check, Outcome
from normprobe.checks.catalogue import matching
from normprobe.records import Finding, ReportData, Settings
from normprobe.records.base import Record

_PARENT = re.compile(r"[.#]")  # a module ends before a dot, an operation inside it begins with #
_PLACES = "path", "parameter"  # the fields by which a record says of what place it is
_NAMES = {*_PLACES, "block", "name", "stream", "parameters"}  # and those in which it names others
Again: TypeAlias = Callable[[Collection[str]], Outcome]
Some = TypeVar("Some", bound=Record)


@dataclass(frozen=True)
class Heard:
    """What is left of one finding, and the patterns that silence the rest; empty where none do."""

    findings: tuple[Finding, ...]
    patterns: tuple[str, ...] = ()


def silences(settings: Settings, checks: Iterable[Check]) -> list[tuple[str, set[str]]]:
    """Patterns of places, each with the codes that are silent there."""
    every = tuple(checks)
    rows = settings.per_path_ignores.items()
    return [(pattern, {check.code for word in words for check in matching(word, every)}) for pattern, words in rows]


def heard(finding: Finding, silent: Sequence[tuple[str, set[str]]], again: Again) -> Heard:
    """What is left of `finding`; `again` asks its check once more, without what was measured at some places.

    Nothing where all its places are silent. Where some are it is made anew without these, so that no value or count is
    theirs. Where its check then does not say of each place left that something is wrong, as it compares them with the
    silent ones or measures them together, the finding stays as it is for the places left, and says so.
    """
    patterns = [pattern for pattern, codes in silent if finding.code in codes]
    covered = {place: next((p for p in patterns if covers(p, place)), None) for place in finding.every_place}
    named = tuple(dict.fromkeys(pattern for pattern in covered.values() if pattern is not None))
    left = [place for place, pattern in covered.items() if pattern is None]
    if not named or not left:
        return Heard(() if named else (finding,), named)
    gone = covered.keys() - set(left)
    anew = [one for one in again(gone) if isinstance(one, Finding) and one.about == finding.about]
    kept = tuple(one for one in anew if set(left) >= set(one.every_place))
    if {place for one in kept for place in one.every_place} == set(left):
        return Heard(kept, named)
    said = f"{finding.message}; said of {len(covered)} places, of which settings ignore {len(gone)}"
    places = tuple(left) if len(left) > 1 else ()
    return Heard((finding.model_copy(update={"where": left[0], "places": places, "message": said}),), named)


def idle(settings: Settings, data: ReportData) -> list[str]:
    """A note for each pattern of places that covers none that the records of `data` know."""
    if not settings.per_path_ignores:
        return []
    known = {place for record in (data.anatomy, data.measurements) for place in _named(record)}
    told = [pattern for pattern in settings.per_path_ignores if not any(covers(pattern, place) for place in known)]
    return [f"per-path-ignores: {pattern!r} covers no place of this model that a check speaks of" for pattern in told]


def _named(record: Record) -> Iterator[str]:
    """Every place that a record and those in it name."""
    for name in type(record).model_fields:
        value = getattr(record, name)
        for one in value if isinstance(value, tuple) else (value,):
            if isinstance(one, Record):
                yield from _named(one)
            elif isinstance(one, str) and name in _NAMES:
                yield one


def covers(pattern: str, place: str) -> bool:
    """Whether `pattern` matches `place` or a module around it."""
    return any(fnmatchcase(outer, pattern) for outer in around(place))


def around(place: str) -> tuple[str, ...]:
    """`place` and every module around it but the model itself."""
    ends = (match.start() for match in _PARENT.finditer(place))
    return place, *(place[:end] for end in ends if end)


def without(data: ReportData, places: Collection[str]) -> ReportData:
    """The document without norms and attention sites at `places`, and without what was measured there."""
    anatomy = data.anatomy
    norms = tuple(norm for norm in anatomy.norms if norm.path not in places)
    attention = tuple(site for site in anatomy.attention if site.path not in places)
    fewer = anatomy.model_copy(update={"norms": norms, "attention": attention})
    return data.model_copy(update={"anatomy": fewer, "measurements": thinned(data.measurements, places)})


def thinned(record: Some, places: Collection[str]) -> Some:
    """`record` without the records in it that are of one of `places`."""
    update: dict[str, Any] = {}
    for name in type(record).model_fields:
        value = getattr(record, name)
        if isinstance(value, Record):
            update[name] = thinned(value, places)
        elif isinstance(value, tuple) and any(isinstance(one, Record) for one in value):
            update[name] = tuple(thinned(one, places) for one in value if _place(one) not in places)
    return record.model_copy(update=update)


def _place(record: Record) -> str | None:
    return next((getattr(record, name) for name in _PLACES if hasattr(record, name)), None)
