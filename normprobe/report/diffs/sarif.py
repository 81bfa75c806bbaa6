"""A comparison as SARIF 2.1.0: a result for each difference, at the places in B, with those in A as related ones."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from normprobe.records.diff import DiffData, Difference
from normprobe.report import sarif
from normprobe.report.diffs import content
from normprobe.report.lint import digest
from normprobe.version import __version__

_MEANING = {
    "error": "The models compute another function.",
    "warning": "The same function is rounded otherwise.",
    "note": "The form alone differs.",
}
_IN_A, _IN_B = "in A", "in B"


def document(data: DiffData) -> str:
    """The comparison as one SARIF log with one run, with a newline at the end."""
    return sarif.log(_run(data))


def _run(data: DiffData) -> dict[str, Any]:
    kinds = list(dict.fromkeys(map(content.kind, data.differences)))
    worst = {content.kind(one): one for one in reversed(data.differences)}  # the worst come first
    facts = data.model_dump(mode="json", by_alias=True, include={"a", "b", "inputs", "level", "verdict", "complete"})
    return {
        "tool": sarif.driver(data.versions.get("normprobe", __version__), [_rule(kind, worst[kind]) for kind in kinds]),
        "automationDetails": {"id": f"normprobe-diff/{content.title(data)}"},
        "invocations": [{"executionSuccessful": True, "toolExecutionNotifications": list(_notifications(data))}],
        "results": [_result(one, kinds.index(content.kind(one)), data) for one in data.differences],
        "properties": facts,
    }


def _rule(kind: str, worst: Difference) -> dict[str, Any]:
    told = f"{content.heading(worst)} is not the same in both models"
    return {
        "id": kind,
        "name": "".join(part.capitalize() for part in kind.replace("/", "_").split("_")),
        "shortDescription": {"text": told},
        "help": {"text": f"{told}. {_MEANING[worst.severity.value]}"},
        "defaultConfiguration": {"level": worst.severity.value},
    }


def _notifications(data: DiffData) -> Iterator[dict[str, Any]]:
    """The verdict, what could not be compared, and the notes."""
    level = "warning" if data.verdict == "unknown" else "note"
    yield {"level": level, "message": {"text": content.verdict_text(data)}}
    for one in data.skipped:
        yield {"level": "note", "message": {"text": f"not compared: {one.what}: {one.why}"}}
    for note in data.notes:
        yield {"level": "note", "message": {"text": note}}


def _result(one: Difference, index: int, data: DiffData) -> dict[str, Any]:
    """Where B has no such part, the places in A are those of the result."""
    in_a = [sarif.location(a, data.a) for a, _ in one.where if a]
    in_b = [sarif.location(b, data.b) for _, b in one.where if b]
    related = [place | {"id": i, "message": {"text": _IN_A}} for i, place in enumerate(in_a if in_b else [])]
    named = content.kind(one), *(f"{a}|{b}" for a, b in sorted(one.where))
    return {
        "ruleId": content.kind(one),
        "ruleIndex": index,
        "level": one.severity.value,
        "message": {"text": " ".join(one.message.split())},
        "locations": [place | {"message": {"text": _IN_B if in_b else _IN_A}} for place in in_b or in_a],
        **sarif.fingerprints(digest(*named)),
        "properties": json.loads(one.model_dump_json(include={"a", "b"})),
    } | ({"relatedLocations": related} if related else {})
