"""Whether a rewrite did good and no harm: findings before it against those after."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any, TypeAlias

from normprobe.records import Finding, Skipped
from normprobe.report.report import Report

Key: TypeAlias = tuple[str, str]

_SLACK = 0.05  # choice: a finding that moves away from its limit by less is not called worse


def keys(findings: Iterable[Finding]) -> set[Key]:
    """Code and place of everything that findings stand for."""
    return {(finding.code, place) for finding in findings for place in finding.every_place}


def unlooked(key: Key, report: Report) -> Skipped | None:
    """What says that the check of a finding did not look at its place; None where it did."""
    code, place = key
    skips = (one for one in report.skipped if one.what.startswith(f"{code} "))
    return next((one for one in skips if not one.places or place in one.places), None)


def verdict(meant: Sequence[Finding], before: Sequence[Finding], after: Report) -> str | None:
    """Why a rewrite has to be taken back; None where it did good and no harm.

    Args:
        meant: the findings that it was to mend.
        before: all findings before it.
        after: the report behind it.
    """
    harm = [text for finding in after.findings if (text := _worse(finding, before)) is not None]
    harm = harm or list(_hidden(before, after))
    if harm:
        return "; ".join(harm)
    if mended(meant, after):
        return None
    gone = sorted(keys(meant) - keys(after.findings))
    why = next((skip.why for key in gone if (skip := unlooked(key, after)) is not None), None)
    return "it mended none of its findings" if why is None else f"whether it mended them could not be told: {why}"


def mended(meant: Iterable[Finding], after: Report) -> set[Key]:
    """Codes and places that are found no more although their check looked."""
    return {key for key in keys(meant) - keys(after.findings) if unlooked(key, after) is None}


def _hidden(before: Sequence[Finding], after: Report) -> Iterable[str]:
    """Findings that are gone because their check can no longer look, though it was asked to."""
    for key in sorted(keys(before) - keys(after.findings)):
        skip = unlooked(key, after)
        if skip is not None and not skip.unasked:
            yield f"{key[0]} at {key[1]} could no longer be told: {skip.why}"


def _worse(finding: Finding, before: Sequence[Finding]) -> str | None:
    """How a finding is new or worse at one of its places; None where it is neither."""
    known = {key: f for f in before for key in keys([f])}
    for key in sorted(keys([finding])):
        place, old = f"{finding.code} {finding.name} at {key[1]}", known.get(key)
        if old is None:
            return f"it raised {place}"
        if finding.severity.rank < old.severity.rank:
            return f"it made {place} worse, {finding.severity.value} instead of {old.severity.value}"
        was, now = _excess(old), _excess(finding)
        if was is not None and (now is None or not now <= was + _SLACK):
            return f"it moved {place} from {old.value} to {finding.value}"
    return None


def _excess(finding: Finding) -> float | None:
    """How far the value lies from its limit, as |ln(value / limit)|; None where that has no meaning."""
    numbers: list[Any] = [finding.value, finding.limit]
    if any(not isinstance(n, (int, float)) or not math.isfinite(n) or n <= 0 for n in numbers):
        return None
    return abs(math.log(numbers[0] / numbers[1]))
