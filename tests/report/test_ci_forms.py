"""The forms for CI systems: GitHub's workflow commands and JUnit XML."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

from normprobe.records import Finding, Ignored, ReportData, Settings, Skipped, Target
from normprobe.report.formats import Format, content
from normprobe.report.report import Report
from tests.report import examples

RAN = ("NP201", "NP208", "NP303", "NP401")


def finding(**more: Any) -> Finding:
    facts = {"code": "NP401", "name": "unresolved-logits", "severity": "warning", "where": "a", "message": "large"}
    return Finding.model_validate(facts | {"source": "choice"} | more)


def report(*findings: Finding, **more: Any) -> ReportData:
    clean = examples.clean()
    skipped = tuple(one for one in clean.skipped if not one.what.startswith("NP"))
    facts = {"checks": RAN, "target": Target(name="net.py:build"), "findings": findings, "skipped": skipped}
    return clean.model_copy(update=facts | more)


def lines(data: ReportData) -> list[str]:
    return content(data, Format.GITHUB).splitlines()


def cases(data: ReportData) -> dict[str, ElementTree.Element]:
    return {case.attrib["name"][:5]: case for case in suite(data).iter("testcase")}


def suite(data: ReportData) -> ElementTree.Element:
    found = ElementTree.fromstring(content(data, Format.JUNIT)).find("testsuite")
    assert found is not None
    return found


@pytest.mark.parametrize(("severity", "command"), [("error", "error"), ("warning", "warning"), ("note", "notice")])
def test_a_finding_is_a_command_of_its_severity(severity: str, command: str) -> None:
    told = lines(report(finding(severity=severity, value=71.0)))
    assert told[0] == (
        f"::{command} file=net.py,title=NP401 unresolved-logits::a: large (measured 71 · source: choice)"
    )
    assert told[-1].startswith("normprobe: net.py:build: ")
    assert len([line for line in told if line.startswith("::")]) == 1


def test_what_has_a_meaning_in_a_command_is_escaped() -> None:
    odd = finding(message="100% sure\n::error::no", name="a,b:c%", where="m,n:o")
    (command,) = [line for line in lines(report(odd)) if line.startswith("::")]
    assert "title=NP401 a%2Cb%3Ac%25::m,n:o: 100%25 sure ::error::no (" in command


@given(st.text(), st.text(min_size=1), st.text())
def test_no_text_begins_a_command_of_its_own(message: str, name: str, why: str) -> None:
    odd = report(
        finding(message=message, name=name, where=name),
        finding(known=True, name=name, where=name),
        skipped=(Skipped(what=message, why=why),),
        ignored=(Ignored(code="NP201", name=name, why=why),),
        target=Target(name=name),
        settings=Settings(source=why, limits={message: {name: 1.0}}),
    )
    text = content(odd, Format.GITHUB)
    assert len(re.findall(r"(?:^|[\n\r])\s*::", text)) == 1
    assert "\r" not in text


def test_known_findings_are_lines_and_no_commands() -> None:
    told = lines(report(finding(known=True), skipped=(Skipped(what="vision", why="it"),)))
    assert told[:2] == ["known: NP401 unresolved-logits at a", "not looked at: vision: it"]
    assert "nothing new, 1 finding known · 1 not looked at" in told[-1]
    assert not any(line.startswith("::") for line in told)


def test_notes_are_told_in_every_form() -> None:
    data = report(notes=("the baseline is of Other,\nthis model is Net",))
    assert "note: the baseline is of Other, this model is Net" in lines(data)
    told = [one.attrib["value"] for one in suite(data).iter("property") if one.attrib["name"] == "note"]
    assert told == list(data.notes)


def test_every_check_that_ran_is_a_case() -> None:
    data = report(finding(), finding(where="b"), finding(code="NP201", name="missing-final-norm", severity="error"))
    found = suite(data)
    assert [case.attrib["name"] for case in found.iter("testcase")] == [
        "NP201 missing-final-norm",
        "NP208 unused-norm",
        "NP303 massive-activations",
        "NP401 unresolved-logits",
    ]
    assert [found.get(key) for key in ("tests", "failures", "skipped", "errors")] == ["4", "1", "0", "0"]
    assert cases(data)["NP201"].attrib["classname"] == "normprobe.checks.placement"
    assert len(cases(data)["NP208"]) == 0


@pytest.mark.parametrize(("fail_on", "failing"), [("error", 0), ("warning", 2), ("note", 3), ("never", 0)])
def test_what_fails_the_run_fails_its_case_and_the_rest_is_output(fail_on: Any, failing: int) -> None:
    found = (finding(), finding(where="b"), finding(severity="note", where="c"), finding(known=True, where="d"))
    data = report(*found, settings=Settings(fail_on=fail_on))
    case = cases(data)["NP401"]
    assert len(case.findall("failure")) == failing
    assert Report(data).failed() is bool(failing)
    output = case.findtext("system-out", "")
    assert output.count("NP401") == 4 - failing
    assert "  d" in output
    if failing:
        assert case.find("failure").attrib["type"] == "warning"  # type: ignore[union-attr]
        assert case.find("failure").attrib["message"].startswith("a: large")  # type: ignore[union-attr]


def test_what_could_not_be_looked_at_is_skipped_with_its_reason() -> None:
    skipped = (Skipped(what="NP303 massive-activations", why="needs a pass"), Skipped(what="vision", why="unread"))
    data = report(skipped=skipped)
    assert cases(data)["NP303"].find("skipped").attrib["message"] == "NP303 massive-activations: needs a pass"  # type: ignore[union-attr]
    assert suite(data).get("skipped") == "1"
    assert suite(data).findtext("system-out") == "not looked at: vision: unread"
    for severity in ("error", "note"):
        both = report(finding(code="NP303", severity=severity), skipped=skipped)
        assert cases(both)["NP303"].find("skipped") is None
        assert suite(both).get("skipped") == "0"
        assert "needs a pass" in cases(both)["NP303"].findtext("system-out", "")
        assert ("large" in cases(both)["NP303"].findtext("system-out", "")) is (severity == "note")


def test_what_the_settings_left_out_is_a_property() -> None:
    data = report(ignored=(Ignored(code="NP101", name="eps-outside-root", why="in ignore"),))
    values = {one.attrib["name"]: one.attrib["value"] for one in suite(data).iter("property")}
    assert values["left out"] == "NP101 eps-outside-root: in ignore"
    assert values["name"] == "net.py:build"


@given(st.text(), st.text(min_size=1))
def test_any_text_gives_xml(message: str, name: str) -> None:
    data = report(
        finding(message=message, name=name, where=name, severity="error"),
        finding(message=message, severity="note"),
        skipped=(Skipped(what=message, why=name),),
        target=Target(name=name, inputs=message),
    )
    assert suite(data).get("failures") == "1"


def test_control_characters_are_written_as_their_codes() -> None:
    case = cases(report(finding(message="\x1b[0m \x00 \ud800 é", severity="error")))["NP401"]
    text = case.findtext("failure", "")
    assert "\\x1b[0m \\x00 \\xd800 é" in text


def test_a_check_of_another_version_is_named_by_its_finding() -> None:
    data = report(finding(code="NP999", name="of-later", severity="error"), checks=())
    assert [case.attrib["name"] for case in suite(data).iter("testcase")] == ["NP999 of-later"]
    assert cases(data)["NP999"].attrib["classname"] == "normprobe.checks"


def test_junit_is_what_xml_names(tmp_path: Path) -> None:
    Report(report(finding())).save(tmp_path / "r.xml")
    assert (tmp_path / "r.xml").read_text(encoding="utf-8") == content(report(finding()), Format.JUNIT)
