"""The SARIF log: valid against the official schema, and it says what the report says."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from normprobe.checks import ALL, documentation
from normprobe.records import Finding, Ignored, ReportData, Settings, Skipped, Target
from normprobe.report.baseline import against, baseline_of
from normprobe.report.formats import Format, content
from normprobe.report.lint import fingerprint, source_file
from normprobe.report.report import Report
from tests.report import examples
from tests.report.sarif_schema import sarif_schema

NAN = float("nan")


def finding(**more: Any) -> Finding:
    facts = {"code": "NP401", "name": "unresolved-logits", "severity": "warning", "where": "a", "message": "large"}
    return Finding.model_validate(facts | {"source": "choice", "value": 71.0, "limit": 50.0, "unit": "logit"} | more)


def rich() -> ReportData:
    """A report with everything that a log can hold."""
    return examples.faulty().model_copy(
        update={
            "checks": tuple(check.code for check in ALL if check.code != "NP208"),
            "findings": (
                finding(places=("a", "b"), value=NAN, message="x\n\x1b[0m"),
                finding(code="NP999", name="of-another-version", value="garbage", limit=None, unit="", severity="note"),
                finding(code="NP201", name="missing-final-norm", severity="error", known=True, fix="AddFinalNorm"),
            ),
            "skipped": (Skipped(what="NP303 massive-activations at m", why="none"), Skipped(what="vision", why="it")),
            "ignored": (
                Ignored(code="NP208", name="unused-norm", why="in ignore"),
                Ignored(code="NP401", name="unresolved-logits", why="in per-path-ignores of v", findings=2),
            ),
            "target": Target(name="models/my net.py:build", class_name="Net"),
        }
    )


def run_of(data: ReportData) -> dict[str, Any]:
    (run,) = json.loads(content(data, Format.SARIF))["runs"]
    return run


@pytest.fixture(scope="module")
def schema() -> dict[str, Any]:
    return sarif_schema()


@pytest.mark.parametrize("data", [rich(), ReportData(), *(make() for make in examples.ALL.values())])
def test_logs_are_valid(schema: dict[str, Any], data: ReportData) -> None:
    log = json.loads(content(data, Format.SARIF))
    validator = jsonschema.Draft4Validator(schema, format_checker=jsonschema.FormatChecker())
    assert [error.message for error in validator.iter_errors(log)] == []
    assert log["$schema"] == schema["id"]


def test_the_schema_refuses_what_is_wrong(schema: dict[str, Any]) -> None:
    log = json.loads(content(rich(), Format.SARIF))
    log["runs"][0]["results"][0]["level"] = "fatal"
    log["runs"][0]["results"][1]["where"] = "a"
    assert len(list(jsonschema.Draft4Validator(schema).iter_errors(log))) == 2


def test_every_finding_is_a_result_of_its_rule() -> None:
    run = run_of(rich())
    rules = run["tool"]["driver"]["rules"]
    assert [(one["ruleId"], one["level"]) for one in run["results"]] == [
        ("NP401", "warning"),
        ("NP999", "note"),
        ("NP201", "error"),
    ]
    assert all(rules[one["ruleIndex"]]["id"] == one["ruleId"] for one in run["results"])
    first, second, third = run["results"]
    assert first["message"]["text"] == "x \x1b[0m (measured nan logit · limit 50 logit · source: choice)"
    assert first["properties"] == {"value": "NaN", "limit": 50.0, "unit": "logit", "source": "choice"}
    assert second["properties"] == {"value": "garbage", "source": "choice"}
    assert "suppressions" not in first
    assert third["suppressions"][0]["justification"] == "in the baseline"
    assert third["properties"]["fix"] == "AddFinalNorm"


def test_rules_are_the_checks_that_ran_with_their_pages_and_those_left_out() -> None:
    run = run_of(rich())
    rules = {rule["id"]: rule for rule in run["tool"]["driver"]["rules"]}
    assert rules.keys() == {*(check.code for check in ALL), "NP999"}
    for check in ALL:
        assert rules[check.code]["help"]["markdown"] == documentation(check)
        assert rules[check.code]["defaultConfiguration"]["level"] == check.severity.value
    assert rules["NP201"]["name"] == "MissingFinalNorm"
    assert rules["NP999"]["shortDescription"]["text"] == "NP999 of-another-version"
    (override,) = run["invocations"][0]["ruleConfigurationOverrides"]
    assert override == {"descriptor": {"id": "NP208"}, "configuration": {"enabled": False}}


def test_what_was_not_looked_at_is_a_notification_of_its_check() -> None:
    told = run_of(rich())["invocations"][0]["toolExecutionNotifications"]
    assert told[0]["associatedRule"] == {"id": "NP303"}
    assert told[0]["message"]["text"] == "not looked at: NP303 massive-activations at m: none"
    assert "associatedRule" not in told[1]
    assert {one["message"]["text"] for one in told} >= set(rich().notes)


def test_places_are_module_paths_and_the_file_where_the_target_names_one() -> None:
    locations = run_of(rich())["results"][0]["locations"]
    assert [one["logicalLocations"][0]["fullyQualifiedName"] for one in locations] == ["a", "b"]
    assert locations[0]["physicalLocation"] == {
        "artifactLocation": {"uri": "models/my%20net.py"},
        "region": {"startLine": 1},
    }


@pytest.mark.parametrize(
    ("target", "uri"),
    [
        (Target(name="org/name"), "org/name"),
        (Target(name="./checkpoints/my model/"), "checkpoints/my%20model"),
        (Target(name="/abs/net.py:build"), "abs/net.py%3Abuild"),
        (Target(name="package.module:build"), "package.module%3Abuild"),
        (Target(class_name="Net"), "Net"),
        (Target(), "model"),
    ],
)
def test_every_result_has_a_relative_artifact_as_code_scanning_wants_one(target: Target, uri: str) -> None:
    results = run_of(rich().model_copy(update={"target": target}))["results"]
    artifacts = [where["physicalLocation"]["artifactLocation"]["uri"] for one in results for where in one["locations"]]
    assert artifacts == [uri] * 4


def test_findings_in_one_line_are_told_apart() -> None:
    findings = finding(), finding(where="b"), finding(about="tie")
    results = run_of(rich().model_copy(update={"findings": findings}))["results"]
    hashes = [one["partialFingerprints"]["primaryLocationLineHash"] for one in results]
    assert len(set(hashes)) == 3
    assert hashes == [f"{fingerprint(one)}:1" for one in findings]


@pytest.mark.parametrize(
    ("name", "file"),
    [
        ("a/b.py:build", "a/b.py"),
        ("./b.py:build", "b.py"),
        ("a\\b.py:build", "a/b.py"),
        ("conf/config.json", "conf/config.json"),
        ("m.gguf", "m.gguf"),
        ("/abs/b.py:build", None),
        ("../b.py:build", None),
        ("C:/b.py:build", None),
        ("package.module:build", None),
        ("org/name", None),
        ("", None),
    ],
)
def test_the_file_of_a_target(name: str, file: str | None) -> None:
    assert source_file(Target(name=name)) == file


def test_a_fingerprint_holds_whatever_was_measured() -> None:
    first = fingerprint(finding(places=("a", "b")))
    assert first == fingerprint(finding(places=("a", "b"), value=3.0, message="other", severity="error", limit=1.0))
    others = [
        finding(),
        finding(where="b"),
        finding(where="b", places=("b", "a")),
        finding(code="NP402"),
        finding(places=("a", "b", "c")),
        finding(places=("a", "bc")),
        finding(places=("a", "b"), about="tie"),
    ]
    assert len({first, *map(fingerprint, others)}) == 8
    assert run_of(rich())["results"][0]["fingerprints"] == {"normprobe/1": first}


def test_a_log_can_be_saved_by_its_suffix(tmp_path: Path) -> None:
    data = against(examples.faulty(), baseline_of(examples.faulty()))
    Report(data).save(tmp_path / "r.sarif")
    assert (tmp_path / "r.sarif").read_text(encoding="utf-8") == content(data, Format.SARIF)
    assert Settings() == data.settings
