"""What the checks say of healthy models, against the reasons why that is deserved."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any

from benchmarks.healthy import short
from benchmarks.reasons import REASONS, Reason

SEVERITIES = ("error", "warning", "note")
NAMED = 6  # models named in a row


def reason_for(model: str, finding: dict[str, Any]) -> Reason | None:
    """The reason that the data give for a finding on a model; the first that fits."""
    return next((one for one in REASONS if _fits(one, model, finding)), None)


def _fits(reason: Reason, model: str, finding: dict[str, Any]) -> bool:
    same = (reason.code, reason.severity) == (finding["code"], finding["severity"])
    return (
        same
        and re.search(reason.models, model) is not None
        and re.search(reason.message, finding["message"]) is not None
    )


def problems(results: Sequence[dict[str, Any]], whole: bool) -> list[str]:
    """What is to be mended: crashes, errors and warnings without a reason, and over all models reasons without use."""
    crashed = [f"{one['name']} crashed: {one['note']}" for one in results if one["outcome"] == "crashed"]
    used, unexplained = set[Reason](), []
    for one, finding in _said(results):
        reason = reason_for(one["name"], finding)
        if reason is not None:
            used.add(reason)
        elif finding["severity"] != "note":
            unexplained.append(
                f"{one['name']}: {finding['severity']} {finding['code']} without a reason: {finding['message']}"
            )
    stale = [f"no model has {one.code} as {one.severity} for {one.models!r}" for one in REASONS if one not in used]
    return crashed + unexplained + (stale if whole else [])


def _said(results: Sequence[dict[str, Any]]) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    for one in results:
        for finding in one.get("findings", ()):
            yield one, finding


def said_table(results: Sequence[dict[str, Any]], code: str, only: str = "") -> str:
    """A row for each code, severity and reason; empty where the checks say nothing."""
    groups: dict[tuple[int, str, str, str], list[tuple[str, dict[str, Any]]]] = {}
    for one, finding in _said(results):
        if finding["code"].startswith(code) and finding["code"].startswith(only):
            reason = reason_for(one["name"], finding)
            why = reason.why if reason is not None else "" if finding["severity"] == "note" else "**none given**"
            key = SEVERITIES.index(finding["severity"]), finding["code"], finding["name"], why
            groups.setdefault(key, []).append((one["name"], finding))
    rows = [_row(key, members) for key, members in sorted(groups.items())]
    return "\n".join(["| finding | measured | models | why |", "|---|---|---|---|", *rows]) if rows else ""


def _row(key: tuple[int, str, str, str], members: list[tuple[str, dict[str, Any]]]) -> str:
    rank, code, name, why = key
    models = list(dict.fromkeys(short(model) for model, _ in members))
    named = "; ".join(models[:NAMED]) + (f" and {len(models) - NAMED} more" if len(models) > NAMED else "")
    values = [f["value"] for _, f in members if isinstance(f["value"], int | float)]
    span = f"{min(values):.3g} to {max(values):.3g}" if len(set(values)) > 1 else f"{values[0]:.3g}" if values else ""
    return f"| {SEVERITIES[rank]} {code} {name} | {span} | {named} | {why} |"
