"""Whether a rewrite did good and no harm: findings before it against those after."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import TypeAlias

from normprobe.records import Finding, Skipped
from normprobe.report.report import Report

Key: TypeAlias = tuple[str, str]

# Choice: a finding that moves away from its limit by less, since it was mildest, is not called worse.
_SLACK = 0.05


def keys(findings: Iterable[Finding]) -> set[Key]:
    """Code and place of everything that findings stand for."""
    return {(finding.code, place) for finding in findings for place in finding.every_place}


def unlooked(key: Key, report: Report) -> Skipped | None:
    """What says that the check of a finding did not look at its place; None where it did."""
    code, place = key
    skips = (one for one in report.skipped if one.what.startswith(f"{code} "))
    return next((one for one in skips if not one.places or place in one.places), None)


def verdict(meant: Sequence[Finding], earlier: Sequence[Sequence[Finding]], after: Report) -> str | None:
    """Why a rewrite has to be taken back; None where it did good and no harm.

    Args:
        meant: the findings that it was to mend.
        earlier: all findings of every report before it, the first one first: a little worse each time adds up.
        after: the report behind it.
    """
    harm = [text for finding in after.findings if (text := _worse(finding, earlier)) is not None]
    harm = harm or list(_hidden(earlier[-1], after))
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


def _worse(finding: Finding, earlier: Sequence[Sequence[Finding]]) -> str | None:
    """How a finding is new, or worse than it once was at one of its places; None where it is neither."""
    known = [{key: f for f in findings for key in keys([f])} for findings in earlier]
    for key in sorted(keys([finding])):
        place = f"{finding.code} {finding.name} at {key[1]}"
        if key not in known[-1]:
            return f"it raised {place}"
        for old in (findings[key] for findings in reversed(known) if key in findings):
            if finding.severity.rank < old.severity.rank:
                return f"it made {place} worse, {finding.severity.value} instead of {old.severity.value}"
            if _further(finding, old):
                return f"it moved {place} from {old.value} to {finding.value}"
    return None


def _further(finding: Finding, old: Finding) -> bool:
    """Whether a value lies further from its limit than it did: by its ratio to the limit where both are above 0, else
    by the difference. False where there is no such number."""
    was, now, least, limit = map(_number, (old.value, finding.value, old.limit, finding.limit))
    if was is None or now is None or least is None or limit is None or not all(map(math.isfinite, (was, least, limit))):
        return False
    if not math.isfinite(now):
        return True
    if min(was, least, limit) > 0:
        return now <= 0 or abs(math.log(now / limit)) > abs(math.log(was / least)) + _SLACK
    before = abs(was - least)
    return abs(now - limit) > before + _SLACK * max(before, abs(least))


def _number(value: float | str | None) -> float | None:
    return value if isinstance(value, (int, float)) else None
