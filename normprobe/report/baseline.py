"""Baselines: findings that are known do not fail a run, new and worse ones do."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TypeAlias

from normprobe.checks.silence import around
from normprobe.errors import SettingError
from normprobe.records import Finding, ReportData
from normprobe.records.baseline import BASELINE, Baseline, KnownFinding
from normprobe.report.documents import read_document
from normprobe.report.wording import place, plural

_Key: TypeAlias = tuple[str, str, str]
_MOST = 5  # entries that a note names


def baseline_of(data: ReportData) -> Baseline:
    """A baseline that holds every finding of `data`, one entry for each check, place and subject, at its worst."""
    entries: dict[_Key, KnownFinding] = {}
    for finding in data.findings:
        for where in finding.every_place:
            entry = _entry(finding, where)
            old = entries.setdefault(_key(entry), entry)
            if entry.severity.rank < old.severity.rank:
                entries[_key(entry)] = entry
    return Baseline(model=data.target.class_name, findings=tuple(entries[key] for key in sorted(entries)))


def baseline_text(baseline: Baseline) -> str:
    """`baseline` as the content of a file: JSON with a line for each entry, so that differences are read easily."""
    document = baseline.model_dump(mode="json", by_alias=True)
    rows = ",\n".join("  " + json.dumps(row, ensure_ascii=False) for row in document["findings"])
    head = [f" {json.dumps(key)}: {json.dumps(document[key], ensure_ascii=False)}" for key in ("schema", "model")]
    return "{\n" + ",\n".join([*head, ' "findings": [' + (f"\n{rows}\n ]" if rows else "]")]) + "\n}\n"


def read_baseline(path: str | os.PathLike[str]) -> Baseline:
    """The baseline in a file.

    Raises:
        SettingError: there is no such file, or it is no baseline.
    """
    hint = "normprobe audit TARGET --write-baseline FILE makes one"
    parse = Baseline.model_validate
    return read_document(path, "a baseline", BASELINE, parse, hint=hint, raises=SettingError)


def standing(path: str | os.PathLike[str]) -> Baseline:
    """The baseline that a new one would take the place of; an empty one where there is no file, or nothing in it.

    Raises:
        SettingError: the file is no baseline.
    """
    place = Path(path)
    return read_baseline(place) if place.exists() and place.stat().st_size else Baseline()


def extended(data: ReportData, before: Baseline) -> Baseline:
    """A baseline of `data`, with the entries of `before` whose check did not look at their place this time, if it is of
    the same model: a run by a few checks takes nothing from what is known of the others."""
    new = baseline_of(data)
    if before.model != new.model:
        return new
    looked, found = _Looked(data), {_key(entry) for entry in new.findings}
    kept = (entry for entry in before.findings if not looked.at(entry) and _key(entry) not in found)
    return new.model_copy(update={"findings": tuple(sorted((*new.findings, *kept), key=_key))})


class _Looked:
    """Which check looked where: at all places but those that its skips name, at none where one names no place."""

    def __init__(self, data: ReportData) -> None:
        self._codes = set(data.checks)
        self._unseen: dict[str, list[str]] = {}
        for one in data.skipped:
            self._unseen.setdefault(one.what.partition(" ")[0], []).extend(one.places or (".",))

    def at(self, entry: KnownFinding) -> bool:
        """Whether the check of `entry` looked at its place, at what is inside it and around it."""
        unseen = self._unseen.get(entry.code, ())
        return entry.code in self._codes and not any(_meet(entry.where, place) for place in unseen)


def _meet(one: str, other: str) -> bool:
    """Whether one place is the other or inside it; all are inside the model itself."""
    return "." in (one, other) or one in around(other) or other in around(one)


def against(data: ReportData, baseline: Baseline) -> ReportData:
    """`data` with every finding marked that is known, and notes of entries that did not come again.

    A finding is known where the baseline has its check, about the same, at all its places, at least as severe.

    Args:
        data: a report.
        baseline: what is known.
    """
    ranks = {_key(entry): entry.severity.rank for entry in baseline.findings}
    findings = tuple(finding.model_copy(update={"known": _known(finding, ranks)}) for finding in data.findings)
    notes = tuple(dict.fromkeys((*data.notes, *_notes(data, baseline))))
    return data.model_copy(update={"findings": findings, "notes": notes})


def _entry(finding: Finding, where: str) -> KnownFinding:
    """What is known of `finding` at one of its places."""
    facts = finding.model_dump(include={"code", "name", "severity", "about"})
    return KnownFinding.model_validate(facts | {"where": where})


def _key(entry: KnownFinding) -> _Key:
    return entry.code, entry.where, entry.about


def _keys(finding: Finding) -> list[_Key]:
    """What the entries of a finding are known by."""
    return [(finding.code, where, finding.about) for where in finding.every_place]


def _known(finding: Finding, ranks: dict[_Key, int]) -> bool:
    known = [ranks.get(key) for key in _keys(finding)]
    return all(rank is not None and rank <= finding.severity.rank for rank in known)


def _notes(data: ReportData, baseline: Baseline) -> list[str]:
    """What is to be said of the baseline: another model, entries that are gone, entries that were not looked for."""
    notes = []
    if baseline.model and data.target.class_name and baseline.model != data.target.class_name:
        notes.append(f"the baseline is of {baseline.model}, this model is {data.target.class_name}")
    found = {key for finding in data.findings for key in _keys(finding)}
    missing = [entry for entry in baseline.findings if _key(entry) not in found]
    looked = _Looked(data)
    if gone := [entry for entry in missing if looked.at(entry)]:
        notes.append(f"{_entries(gone)} no longer found: write the baseline anew")
    if unseen := [entry for entry in missing if not looked.at(entry)]:
        notes.append(f"{_entries(unseen)} not looked for in full this time")
    return notes


def _entries(entries: list[KnownFinding]) -> str:
    """`2 entries of the baseline are: NP401 at a, NP201 at b`, ready for what follows."""
    named = ", ".join(
        f"{entry.code} at {place(entry.where)}" + (f" ({entry.about})" if entry.about else "")
        for entry in entries[:_MOST]
    )
    more = f" and {len(entries) - _MOST} more" if len(entries) > _MOST else ""
    be = "is" if len(entries) == 1 else "are"
    return f"{plural(len(entries), 'entry', 'entries')} of the baseline ({named}{more}) {be}"
