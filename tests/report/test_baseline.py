"""What is known does not fail a run; what is new, worse or at a further place does; what is gone is told."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from normprobe.errors import NormprobeError, SettingError
from normprobe.records import Anatomy, Finding, ReportData, Severity, Skipped, Target
from normprobe.records.baseline import Baseline
from normprobe.report.baseline import against, baseline_of, baseline_text, read_baseline
from normprobe.report.formats import Format, content
from normprobe.report.groups import finding_groups
from normprobe.report.report import Report
from normprobe.report.verdict import verdict
from tests.report import examples

RAN = ("NP201", "NP303", "NP401")


def finding(code: str = "NP401", where: str = "a", severity: str = "warning", **more: Any) -> Finding:
    facts = {"name": "test", "message": "logits reach 71", "source": "choice", "value": 71.0}
    return Finding.model_validate(facts | {"code": code, "where": where, "severity": severity} | more)


def report(*findings: Finding, **more: Any) -> ReportData:
    return ReportData.model_validate(
        {"checks": RAN, "target": Target(class_name="Net")} | more | {"findings": findings}
    )


def known(before: ReportData, after: ReportData) -> list[bool]:
    return [one.known for one in against(after, baseline_of(before)).findings]


def test_a_finding_is_known_by_check_and_place_and_not_by_what_was_measured() -> None:
    before = report(finding(), finding("NP201", "b", "error"))
    later = finding(value=80.0, message="logits reach 80", limit=60.0)
    assert known(before, report(finding("NP201", "b", "error"), later)) == [True, True]
    assert known(before, report(finding(where="b"), finding("NP303", "a"))) == [False, False]


def test_another_thing_at_the_same_place_is_new() -> None:
    before = report(finding(about="softcap"))
    assert known(before, report(finding(about="softcap", value=3.0), finding(about="tie"))) == [True, False]
    (note,) = against(report(finding(about="tie")), baseline_of(before)).notes
    assert "(NP401 at a (softcap)) is no longer found" in note


@pytest.mark.parametrize(
    ("was", "now", "same"),
    [("warning", "warning", True), ("warning", "note", True), ("warning", "error", False), ("note", "warning", False)],
)
def test_what_has_become_worse_is_new(was: str, now: str, same: bool) -> None:
    assert known(report(finding(severity=was)), report(finding(severity=now))) == [same]
    twice = report(finding(severity="note"), finding(severity="error"))
    assert known(twice, report(finding(severity="error"))) == [True]


def test_every_place_has_to_be_known() -> None:
    before = report(finding(places=("a", "b")))
    assert known(before, report(finding(where="b"), finding(where="a"))) == [True, True]
    assert known(before, report(finding(where="b", places=("b", "a")))) == [True]
    assert known(before, report(finding(places=("a", "b", "c")))) == [False]
    assert known(report(finding(where="a"), finding(where="b")), before) == [True]


def test_a_known_finding_is_shown_and_does_not_fail() -> None:
    data = against(
        report(finding(severity="error"), finding(where="b")), baseline_of(report(finding(severity="error")))
    )
    one = Report(data)
    assert not one.failed("error")
    assert one.failed("warning")
    assert verdict(data.model_copy(update={"anatomy": examples.clean().anatomy})).text == (
        "0 errors, 1 warning, 0 notes, 1 finding known"
    )
    assert [(group.first.known, group.first.where) for group in finding_groups(data.findings)] == [
        (False, "b"),
        (True, "a"),
    ]
    for form in (Format.RICH, Format.HTML, Format.MARKDOWN):
        assert content(data, form).count("known: in the baseline") == 1


def test_when_all_is_known_nothing_is_new() -> None:
    data = examples.faulty()
    said = verdict(against(data, baseline_of(data)))
    assert (said.mark, said.worst, said.text) == ("✓", None, f"nothing new, {len(data.findings)} findings known")
    unread = against(report(finding()), baseline_of(report(finding())))
    assert unread.anatomy == Anatomy()
    assert verdict(unread).mark == "?"


def test_what_is_gone_is_told() -> None:
    before = report(finding(), finding("NP201", ".", "error"))
    (note,) = against(report(), baseline_of(before)).notes
    assert note == (
        "2 entries of the baseline (NP201 at the model itself, NP401 at a) are no longer found: write the baseline anew"
    )
    assert against(before, baseline_of(before)).notes == ()
    many = report(*(finding(where=f"layers.{i}") for i in range(8)))
    assert "and 3 more) are no longer found" in against(report(), baseline_of(many)).notes[0]


@pytest.mark.parametrize(
    "more",
    [{"checks": ("NP201",)}, {"skipped": (Skipped(what="NP401 unresolved-logits", why="needs a measured forward"),)}],
)
def test_what_was_not_looked_for_is_not_called_gone(more: dict[str, Any]) -> None:
    (note,) = against(report(**more), baseline_of(report(finding()))).notes
    assert note == "1 entry of the baseline (NP401 at a) is not looked for in full this time"


def test_a_check_that_did_not_look_at_one_place_looked_at_the_others() -> None:
    before = report(finding(where="layers.1.attn"), finding(where="layers.10"), finding("NP303", "."))
    seen = Skipped(what="NP401 unresolved-logits at layers.1", why="not finite", places=("layers.1",))
    gone, unseen = against(report(skipped=(seen,)), baseline_of(before)).notes
    assert "(NP303 at the model itself, NP401 at layers.10) are no longer found" in gone
    assert unseen == "1 entry of the baseline (NP401 at layers.1.attn) is not looked for in full this time"
    inside = seen.model_copy(update={"places": ("layers.10.attn#softmax",)})
    assert "NP401 at layers.10) is not looked for" in against(report(skipped=(inside,)), baseline_of(before)).notes[1]
    whole = seen.model_copy(update={"what": "NP303 x at layers.1"})
    assert "NP303 at the model itself) is not" in against(report(skipped=(whole,)), baseline_of(before)).notes[1]


def test_a_baseline_of_another_model_is_told() -> None:
    other = baseline_of(report(finding(), target=Target(class_name="Other")))
    assert against(report(finding()), other).notes == ("the baseline is of Other, this model is Net",)


def test_the_file_is_the_same_for_the_same_findings_in_any_order(tmp_path: Path) -> None:
    findings = [finding(where="b", value=3.0), finding("NP201", "é", "error"), finding(places=("a", "c"))]
    text = baseline_text(baseline_of(report(*findings)))
    assert text == baseline_text(baseline_of(report(*findings[::-1])))
    assert [line.strip()[:17] for line in text.splitlines() if '"code"' in line] == [
        '{"code": "NP201",',
        *3 * ['{"code": "NP401",'],
    ]
    assert "71" not in text
    path = tmp_path / "b.json"
    Report(report(*findings)).save_baseline(path)
    assert path.read_text(encoding="utf-8") == text
    assert read_baseline(path) == baseline_of(report(*findings))
    assert json.loads(baseline_text(Baseline())) == {"schema": "normprobe-baseline/1", "model": "", "findings": []}
    assert not Report(report(*findings)).against(path).failed("note")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{", "no JSON text"),
        ("{}", "a document without schema"),
        ("[]", "JSON that holds no object but list"),
        ('{"schema": "normprobe-report/1"}', "a document of schema 'normprobe-report/1'"),
        ('{"schema": "normprobe-baseline/1", "findings": [{"code": "X"}]}', r"at `findings\.0\.code`"),
    ],
)
def test_what_is_no_baseline_is_refused(tmp_path: Path, text: str, said: str) -> None:
    (tmp_path / "b.json").write_text(text)
    with pytest.raises(
        SettingError, match=rf"(?s)cannot read a baseline from .*b\.json.*{said}.*--write-baseline FILE"
    ):
        Report(report()).against(tmp_path / "b.json")
    with pytest.raises(SettingError, match="cannot read a baseline"):
        Report(report()).save_baseline(tmp_path / "b.json")
    assert (tmp_path / "b.json").read_text() == text
    with pytest.raises(SettingError, match="No such file"):
        Report(report()).against(tmp_path / "none.json")
    with pytest.raises(NormprobeError, match="cannot write"):
        Report(report()).save_baseline(tmp_path / "no" / "b.json")


def test_writing_over_a_baseline_keeps_what_was_not_looked_for(tmp_path: Path) -> None:
    path = tmp_path / "known.json"
    path.touch()
    Report(report(finding("NP201", "b", "error"), finding("NP401"), finding("NP303", "c"))).save_baseline(path)
    partly = Skipped(what="NP401 x at e", why="none", places=("e",))
    skipped = Skipped(what="NP303 x", why="none"), partly
    few = report(finding("NP401", "d"), checks=("NP401", "NP303"), skipped=skipped)
    Report(few).save_baseline(path)
    kept = [(entry.code, entry.where) for entry in read_baseline(path).findings]
    assert kept == [("NP201", "b"), ("NP303", "c"), ("NP401", "d")]  # NP401 looked, and found another place
    Report(report(target=Target(class_name="Other"), checks=("NP401",))).save_baseline(path)
    assert read_baseline(path) == Baseline(model="Other")


def test_judging_anew_forgets_what_was_known() -> None:
    assert Severity.ERROR.rank < Severity.NOTE.rank
    data = against(report(finding()), baseline_of(report(finding())))
    assert not any(one.known for one in Report(data).judged(data.settings).findings)
