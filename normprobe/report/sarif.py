"""The report as SARIF 2.1.0, the form that code scanning services and editors read.

A place is a module, which is in no line of a file. But services refuse results without a file and a line, and follow a
result by what they find in that line: so each names the file of the target, its first line, and its own fingerprint.

Source: OASIS, Static Analysis Results Interchange Format (SARIF) Version 2.1.0, errata 01.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any
from urllib.parse import quote

from normprobe.checks import documentation
from normprobe.records import Finding, Ignored, ReportData, Target
from normprobe.report.lint import (
    check_of,
    codes_that_ran,
    fingerprint,
    sentence,
    skips_by_code,
    source_file,
    title,
)
from normprobe.version import __version__

SCHEMA = "https://docs.oasis-open.org/sarif/sarif/v2.1.0/errata01/os/schemas/sarif-schema-2.1.0.json"


def document(data: ReportData) -> str:
    """The report as one SARIF log with one run, with a newline at the end."""
    return log(_run(data))


def log(run: dict[str, Any]) -> str:
    """A SARIF log with one run, with a newline at the end."""
    whole = {"$schema": SCHEMA, "version": "2.1.0", "runs": [run]}
    return json.dumps(whole, indent=2, ensure_ascii=False, allow_nan=False) + "\n"


def driver(version: str, rules: list[dict[str, Any]]) -> dict[str, Any]:
    """The tool that made the run, with its rules."""
    return {"driver": {"name": "normprobe", "version": version, "semanticVersion": version, "rules": rules}}


def _run(data: ReportData) -> dict[str, Any]:
    off = [one for one in data.ignored if one.findings is None]
    codes = list(dict.fromkeys((*codes_that_ran(data), *(one.code for one in off))))
    version = data.versions.get("normprobe", __version__)
    rules = [_rule(code, data) for code in codes]
    return {
        "tool": driver(version, rules),
        "automationDetails": {"id": f"normprobe/{data.target.name or data.target.class_name or 'model'}"},
        "invocations": [_invocation(data, off)],
        "results": [_result(finding, codes.index(finding.code), data) for finding in data.findings],
        "properties": data.target.model_dump(mode="json", by_alias=True) | {"level": data.level},
    }


def _rule(code: str, data: ReportData) -> dict[str, Any]:
    """The description of a check; for one of another version what its findings say."""
    check = check_of(code)
    if check is None:
        return {"id": code, "shortDescription": {"text": title(code, data.findings)}}
    return {
        "id": code,
        "name": "".join(part.capitalize() for part in check.name.split("-")),
        "shortDescription": {"text": check.summary()},
        "fullDescription": {"text": check.summary()},
        "help": {"text": check.page(), "markdown": documentation(check)},
        "defaultConfiguration": {"level": check.severity.value},
        "properties": {"tags": check.needs.words()},
    }


def _invocation(data: ReportData, off: list[Ignored]) -> dict[str, Any]:
    """That the run came to its end, what it could not look at, and which checks the settings left out."""
    overrides = [{"descriptor": {"id": one.code}, "configuration": {"enabled": False}} for one in off]
    return {
        "executionSuccessful": True,
        "toolExecutionNotifications": list(_notifications(data)),
        "ruleConfigurationOverrides": overrides,
    }


def _notifications(data: ReportData) -> Iterator[dict[str, Any]]:
    for code, skips in skips_by_code(data).items():
        for one in skips:
            rule = {"associatedRule": {"id": code}} if code else {}
            yield {"level": "note", "message": {"text": f"not looked at: {one.what}: {one.why}"}} | rule
    for note in data.notes:
        yield {"level": "note", "message": {"text": note}}


def _result(finding: Finding, index: int, data: ReportData) -> dict[str, Any]:
    facts = json.loads(finding.model_dump_json(include={"value", "limit", "unit", "source", "fix", "fixes"}))
    known = {"kind": "external", "status": "accepted", "justification": "in the baseline"}
    return {
        "ruleId": finding.code,
        "ruleIndex": index,
        "level": finding.severity.value,
        "message": {"text": sentence(finding)},
        "locations": [location(place, data.target) for place in finding.every_place],
        **fingerprints(fingerprint(finding)),
        "properties": {key: value for key, value in facts.items() if value not in (None, "", [])},
    } | ({"suppressions": [known]} if finding.known else {})


def fingerprints(digest: str) -> dict[str, Any]:
    """What a result is known by from run to run."""
    return {
        "fingerprints": {"normprobe/1": digest},
        "partialFingerprints": {"primaryLocationLineHash": f"{digest}:1"},
    }


def location(place: str, target: Target) -> dict[str, Any]:
    """The module path, and the artifact that the target is of."""
    return {
        "physicalLocation": {"artifactLocation": {"uri": _artifact(target)}, "region": {"startLine": 1}},
        "logicalLocations": [{"fullyQualifiedName": place, "kind": "module"}],
    }


def _artifact(target: Target) -> str:
    """The file of the target where its name says one, else its name as a path: a relative reference in any case, as
    services refuse absolute ones outside of their checkout."""
    parts = (target.name or target.class_name).replace("\\", "/").split("/")
    return quote(source_file(target) or "/".join(part for part in parts if part not in ("", ".", "..", "~")) or "model")
