"""Findings with the same code, and skips with the same reason, gathered for a reader."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from normprobe.records import Finding, Ignored, ReportData, Severity, Skipped
from normprobe.report.streams import stream_title
from normprobe.report.wording import number, plural

_MOST_CHECKS = 6  # named; more are counted, --format json names all


@dataclass(frozen=True)
class FindingGroup:
    """All findings of one code and severity that stand on one claim; `first` speaks for them."""

    first: Finding
    findings: tuple[Finding, ...]

    @property
    def severity(self) -> Severity:
        """The severity they share."""
        return self.first.severity

    @property
    def places(self) -> tuple[str, ...]:
        """Every place once, in the order in which they were found."""
        return tuple(dict.fromkeys(place for one in self.findings for place in one.every_place))

    @property
    def others(self) -> int:
        """How many findings say something else than `first` does."""
        return sum(one.message != self.first.message for one in self.findings)

    @property
    def evidence(self) -> list[str]:
        """Measured value (its range over several findings), limit, and where the limit comes from."""
        unit = f" {self.first.unit}" if self.first.unit not in ("", "1") else ""
        measured, limit = _values(self.findings), self.first.limit
        parts = (
            f"measured {measured}{unit}" if measured else "",
            f"limit {_text(limit)}{unit}" if limit is not None else "",
            f"source: {self.first.source}",
            "known: in the baseline" if self.first.known else "",
        )
        return [part for part in parts if part]


def finding_groups(findings: Sequence[Finding]) -> list[FindingGroup]:
    """One group for each severity, code and source, the worst severity first, then as they come; what is known comes
    last.

    Findings of one check that stand on different sources are measured against different limits.
    """
    groups: dict[tuple[bool, int, str, str], list[Finding]] = {}
    for one in findings:
        groups.setdefault((one.known, one.severity.rank, one.code, one.source), []).append(one)
    ordered = sorted(groups.items(), key=lambda item: item[0][:2])
    return [FindingGroup(members[0], tuple(members)) for _, members in ordered]


def titled_places(data: ReportData, group: FindingGroup) -> list[str]:
    """The places of a group as a reader knows them."""
    return [stream_title(data, place) for place in group.places]


def skipped_groups(skipped: Sequence[Skipped]) -> list[tuple[tuple[str, ...], str]]:
    """(what was skipped, the reason) for each distinct reason, in the order in which they came; what the probe was not
    asked for comes last, in one row."""
    groups: dict[str, list[str]] = {}
    for one in (one for one in skipped if not one.unasked):
        groups.setdefault(one.why, []).append(one.what)
    rows = [(tuple(dict.fromkeys(what)), why) for why, what in groups.items()]
    unasked = _unasked(skipped)
    return [*rows, (("not asked for",), unasked)] if unasked else rows


def _unasked(skipped: Sequence[Skipped]) -> str:
    """What the probe was not asked for, each with the checks that need it; empty where nothing is missing."""
    groups: dict[str, list[str]] = {}
    for one in (one for one in skipped if one.unasked):
        groups.setdefault(one.unasked, []).append(one.what.partition(" ")[0])
    parts = []
    for what, codes in groups.items():
        named = dict.fromkeys(codes)
        parts.append(f"{what}: {', '.join(named) if len(named) <= _MOST_CHECKS else plural(len(named), 'check')}")
    return " · ".join(parts)


def left_out(data: ReportData) -> list[tuple[str, str]]:
    """What the settings of the report left out or changed, each with the setting that did; empty where nothing."""
    groups: dict[str, list[Ignored]] = {}
    for one in data.ignored:
        groups.setdefault(one.why, []).append(one)
    rows = [(_ignored_text(members), why) for why, members in groups.items()]
    limits = ((check, name, value) for check, named in data.settings.limits.items() for name, value in named.items())
    return rows + [(check, f"{name} is {number(value)} in limits") for check, name, value in limits]


def _ignored_text(members: Sequence[Ignored]) -> str:
    counts = [f"{plural(one.findings, 'finding')} of {one.code}" for one in members if one.findings is not None]
    checks = [f"{one.code} {one.name}" for one in members if one.findings is None]
    shown = checks if len(checks) <= _MOST_CHECKS else [plural(len(checks), "check")]
    return ", ".join([*shown, *counts])


def _text(value: float | str) -> str:
    return value if isinstance(value, str) else number(value)


def _values(findings: Sequence[Finding]) -> str:
    values = [one.value for one in findings if one.value is not None]
    numbers = [value for value in values if not isinstance(value, str)]
    if not values or len(numbers) != len(values):
        return ", ".join(dict.fromkeys(_text(value) for value in values))
    broken = [value for value in numbers if math.isnan(value)]
    low, high = (number(pick(set(numbers) - set(broken), default=math.nan)) for pick in (min, max))
    span = low if low == high else f"{low} to {high}"
    return f"{span}, {len(broken)} × nan" if broken and len(broken) < len(numbers) else span
