"""A comparison in the forms for CI systems: SARIF, GitHub's workflow commands, JUnit XML."""

from __future__ import annotations

import json
import re
from typing import Any
from xml.etree import ElementTree

import jsonschema
import pytest
from hypothesis import given
from hypothesis import strategies as st

from normprobe.records import Skipped, Target
from normprobe.records.diff import DiffData, Difference, Match
from normprobe.report.diffs.report import DiffReport
from tests.report.sarif_schema import sarif_schema

FORMS = ["sarif", "github", "junit"]


def difference(**more: Any) -> Difference:
    facts = {
        "subject": "norm",
        "fact": "eps",
        "severity": "error",
        "a": 1e-6,
        "b": 1e-3,
        "where": (("a.norm", "norm"),),
    }
    return Difference.model_validate(facts | {"message": "eps is 1e-06 in A and 0.001 in B"} | more)


def compared(*found: Difference, **more: Any) -> DiffReport:
    verdict = "differs" if any(one.severity.value != "note" for one in found) else "same"
    matched = tuple(Match(subject=subject, a="x", b="y") for subject in ("branch", "norm"))  # type: ignore[arg-type]
    facts = {"a": Target(name="old.py:build"), "b": Target(name="new/net.py:build"), "verdict": verdict}
    return DiffReport(DiffData.model_validate(facts | {"differences": found, "matched": matched} | more))


def whole() -> DiffReport:
    found = (
        difference(where=(("a.0", "b.0"), ("a.1", "b.1")), a=float("nan")),
        difference(subject="branch", fact="missing", where=(("a.2", ""),), a=None, b=None, message="B lacks it\n"),
        difference(severity="warning", fact="reduction", a="float32", b="bfloat16"),
        difference(severity="note"),
    )
    return compared(*found, skipped=(Skipped(what="weights", why="none"),), notes=("a note",))


def suite(report: DiffReport) -> ElementTree.Element:
    found = ElementTree.fromstring(report.content("junit")).find("testsuite")
    assert found is not None
    return found


def run_of(report: DiffReport) -> dict[str, Any]:
    (run,) = json.loads(report.content("sarif"))["runs"]
    return run


@pytest.mark.parametrize("report", [whole(), compared(), DiffReport(DiffData()), compared(verdict="unknown")])
def test_logs_are_valid(report: DiffReport) -> None:
    validator = jsonschema.Draft4Validator(sarif_schema(), format_checker=jsonschema.FormatChecker())
    assert [error.message for error in validator.iter_errors(json.loads(report.content("sarif")))] == []


def test_every_difference_is_a_result_of_its_rule_with_the_places_of_both() -> None:
    run = run_of(whole())
    rules = run["tool"]["driver"]["rules"]
    assert [rule["id"] for rule in rules] == ["diff/norm/eps", "diff/branch/missing", "diff/norm/reduction"]
    assert [rule["defaultConfiguration"]["level"] for rule in rules] == ["error", "error", "warning"]
    results = run["results"]
    assert [one["level"] for one in results] == ["error", "error", "warning", "note"]
    assert all(rules[one["ruleIndex"]]["id"] == one["ruleId"] for one in results)
    places = [one["logicalLocations"][0]["fullyQualifiedName"] for one in results[0]["locations"]]
    others = [one["logicalLocations"][0]["fullyQualifiedName"] for one in results[0]["relatedLocations"]]
    assert (places, others) == (["b.0", "b.1"], ["a.0", "a.1"])
    files = [one["physicalLocation"]["artifactLocation"]["uri"] for one in results[0]["locations"]]
    assert files == ["new/net.py"] * 2
    assert results[0]["properties"] == {"a": "NaN", "b": 1e-3}
    assert results[1]["message"]["text"] == "B lacks it"
    assert results[1]["locations"][0]["message"]["text"] == "in A"
    assert results[1]["locations"][0]["physicalLocation"]["artifactLocation"]["uri"] == "old.py"
    assert "relatedLocations" not in results[1]
    prints = [one["fingerprints"]["normprobe/1"] for one in results]
    assert len(set(prints)) == 4
    told = [one["message"]["text"] for one in run["invocations"][0]["toolExecutionNotifications"]]
    assert told[1:] == ["not compared: weights: none", "a note"]


def test_a_comparison_that_tells_nothing_warns() -> None:
    report = compared(verdict="unknown", complete=False)
    (first, *_) = run_of(report)["invocations"][0]["toolExecutionNotifications"]
    assert (first["level"], "not enough was compared" in first["message"]["text"]) == ("warning", True)
    assert re.search(r"^::warning title=normprobe diff::.*not enough was compared", report.content("github"), re.M)
    assert suite(report).get("errors") == "1"
    assert suite(compared(verdict="unknown", complete=False, fail_on="never")).get("errors") == "0"


def test_a_difference_is_a_command_of_its_severity() -> None:
    lines = whole().content("github").splitlines()
    assert lines[2] == (
        "::warning file=new/net.py,title=norm reduction::a.norm | norm: eps is 1e-06 in A and 0.001 in B"
    )
    assert [line.split()[0] for line in lines[:4]] == ["::error", "::error", "::warning", "::notice"]
    assert lines[1].endswith("::a.2: B lacks it")
    assert lines[4:6] == ["not compared: weights: none", "note: a note"]
    assert lines[-1].startswith("normprobe: A old.py:build · B new/net.py:build: B differs from A: 2 errors")


@pytest.mark.parametrize(("fail_on", "failing"), [("error", 2), ("warning", 3), ("note", 4), ("never", 0)])
def test_subjects_are_cases_that_fail_as_the_run_does(fail_on: str, failing: int) -> None:
    report = DiffReport(whole().data.model_copy(update={"fail_on": fail_on}))
    cases = {case.attrib["name"]: case for case in suite(report).iter("testcase")}
    assert list(cases) == ["branch", "norm", "verdict"]
    assert sum(len(case.findall("failure")) for case in cases.values()) == failing
    assert report.failed() is bool(failing)
    norms = 2 if failing else 0
    assert [suite(report).get(key) for key in ("tests", "failures", "errors")] == ["3", str(norms), "0"]
    assert suite(report).findtext("system-out") == "not compared: weights: none"
    if fail_on == "error":
        assert cases["norm"].find("failure").attrib["message"].startswith("norm eps: eps is")  # type: ignore[union-attr]
        assert "  a.0 | b.0\n  a.1 | b.1" in cases["norm"].findtext("failure", "")
        assert "warning norm reduction" in cases["norm"].findtext("system-out", "")
    assert "  a.2 | (none)" in "".join(cases["branch"].itertext())


@given(st.text(), st.text(min_size=1))
def test_any_text_is_held(message: str, name: str) -> None:
    one = difference(message=message, where=((name, name),), b=name)
    report = compared(one, skipped=(Skipped(what=message, why=name),), notes=(message,), b=Target(name=name))
    assert len(re.findall(r"(?:^|[\n\r])\s*::", report.content("github"))) == 1
    assert suite(report).get("failures") == "1"
    assert json.loads(report.content("sarif").encode("utf-8", "surrogatepass"))


@pytest.mark.parametrize("form", FORMS)
def test_every_form_ends_with_one_newline(form: str) -> None:
    text = whole().content(form)
    assert text.endswith("\n")
    assert not text.endswith("\n\n")
