from __future__ import annotations

import json
import math
import os
from pathlib import Path

import pytest

from normprobe.errors import NormprobeError, SettingError
from normprobe.records import Finding, ReportData, Severity
from normprobe.report.report import Report
from tests.report import examples


@pytest.fixture(params=examples.ALL)
def report(request: pytest.FixtureRequest) -> Report:
    return Report(examples.ALL[request.param]())


def finding(severity: Severity, **more: object) -> Finding:
    fields = {"code": "NP999", "name": "test", "where": "m", "message": "m", "source": "choice"}
    return Finding.model_validate({**fields, "severity": severity, **more})


def test_a_saved_report_is_read_back_without_loss(report: Report, tmp_path: Path) -> None:
    report.save(tmp_path / "report.json")
    again = Report.load(tmp_path / "report.json")
    assert again == report
    assert again.to_json() == report.to_json()
    assert repr(again) == repr(report)


def test_the_suffix_names_the_form_of_a_saved_report(report: Report, tmp_path: Path) -> None:
    texts = {"r.html": report.to_html(), "r.md": report.to_markdown(), "r.JSON": report.to_json() + "\n"}
    for name, text in texts.items():
        report.save(tmp_path / name)
        assert (tmp_path / name).read_text(encoding="utf-8") == text
    assert texts["r.html"].startswith("<!DOCTYPE html>")
    with pytest.raises(SettingError, match=r"no format of the suffix \.pdf"):
        report.save(tmp_path / "r.pdf")


def test_non_finite_values_come_back_as_numbers(tmp_path: Path) -> None:
    report = Report(examples.not_finite())
    report.save(tmp_path / "r.json")
    again = Report.load(tmp_path / "r.json")
    assert again.findings[0].value == math.inf
    assert math.isnan(again.residual[0].states[-1].rms_median)
    assert math.isnan(again.residual[0].growth.interval[0])


def test_json_is_strict_and_has_the_shape_of_the_contract(report: Report) -> None:
    def refuse(name: str) -> None:
        raise AssertionError(f"{name} is no JSON number")

    document = json.loads(report.to_json(), parse_constant=refuse)
    assert document["schema"] == "normprobe-report/1"
    assert set(document) >= {"target", "anatomy", "measurements", "findings", "skipped", "notes"}
    assert set(document["anatomy"]) >= {"norms", "streams", "attention", "reparametrizations", "head"}
    for norm in document["anatomy"]["norms"]:
        assert {"path", "role", "kind", "eps", "class"} <= set(norm)
        assert "class_name" not in norm
    assert "class" in document["target"]


def assert_plain(value: object) -> None:
    assert type(value) in (dict, list, str, int, float, bool, type(None)), type(value)
    for item in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        assert_plain(item)


def test_to_dict_holds_plain_values_with_numbers_as_numbers(report: Report) -> None:
    document = report.to_dict()
    assert_plain(document)
    assert ReportData.model_validate(document).model_dump_json() == report.data.model_dump_json()


def test_to_dict_keeps_nan_as_a_number() -> None:
    document = Report(examples.not_finite()).to_dict()
    assert math.isnan(document["measurements"]["residual"][0]["states"][-1]["rms_median"])


@pytest.mark.parametrize(
    ("severities", "worst", "failing"),
    [
        ([], None, []),
        ([Severity.NOTE], Severity.NOTE, ["note"]),
        ([Severity.NOTE, Severity.WARNING], Severity.WARNING, ["warning", "note"]),
        ([Severity.WARNING, Severity.ERROR], Severity.ERROR, ["error", "warning", "note"]),
    ],
)
def test_failed_compares_with_the_worst_severity(
    severities: list[Severity], worst: Severity | None, failing: list[str]
) -> None:
    report = Report(ReportData(findings=tuple(map(finding, severities))))
    assert report.worst is worst
    assert [limit for limit in ("error", "warning", "note") if report.failed(Severity(limit))] == failing
    assert not report.failed("never")


def test_an_unknown_limit_is_refused() -> None:
    with pytest.raises(ValueError, match="'fatal' is not a valid Severity"):
        Report(ReportData()).failed("fatal")  # type: ignore[arg-type]


def test_a_failed_save_leaves_the_old_file_and_no_rest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "report.json"
    Report(examples.clean()).save(path)
    before = path.read_bytes()

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(NormprobeError, match=r"cannot write to `.*report.json`(?s:.)*No space left"):
        Report(examples.faulty()).save(path)
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


def test_saving_replaces_what_a_link_points_to_and_keeps_permissions(tmp_path: Path) -> None:
    target, link = tmp_path / "real.json", tmp_path / "link.json"
    target.write_text("old")
    target.chmod(0o640)
    link.symlink_to(target)
    Report(examples.clean()).save(link)
    assert link.is_symlink()
    assert target.stat().st_mode & 0o777 == 0o640
    assert Report.load(target) == Report(examples.clean())


@pytest.mark.parametrize("path", ["missing/report.json", "."])
def test_an_impossible_place_is_named(tmp_path: Path, path: str) -> None:
    with pytest.raises(NormprobeError, match="cannot write to"):
        Report(examples.clean()).save(tmp_path / path)


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("", "no JSON text"),
        ("{}", "a document without anatomy and schema and target"),
        ('{"schema": "normprobe-report/1"}', "a document without anatomy and target"),
        ("[]", "JSON that holds no object but list"),
        ('{"schema": "other/1", "target": {}, "anatomy": {}}', "a document of schema 'other/1'"),
        ('{"schema": "normprobe-report/1", "target": {}, "anatomy": {}, "surprise": 1}', "at `surprise`"),
        ('{"schema": "normprobe-report/1", "target": {}, "anatomy": {}, "findings": [1]}', r"at `findings\.0`"),
        ("\0", "no JSON text"),
    ],
)
def test_other_documents_are_refused_with_their_fault(tmp_path: Path, text: str, found: str) -> None:
    path = tmp_path / "other.json"
    path.write_text(text)
    with pytest.raises(NormprobeError, match=f"cannot read a report(?s:.)*{found}"):
        Report.load(path)


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(NormprobeError, match="found: No such file"):
        Report.load(tmp_path / "none.json")


def test_the_summary_is_ascii_with_the_verdict_first() -> None:
    lines = repr(Report(examples.faulty())).splitlines()
    assert lines[0] == "normprobe: checkpoints/run-17/step-020000: 2 errors, 3 warnings, 0 notes"
    assert lines[1] == (
        "  transformer.h: pre-norm, 12 blocks, 24 branches, NO final norm, rms 0.4 to 237 (exponent 2.19)"
    )
    assert "  warning NP401 unresolved-logits at transformer.h.10-11.attn" in lines
    assert "\n".join(lines).isascii()


def test_a_notebook_gets_html_beside_text() -> None:
    report = Report(examples.clean())
    bundle = report._repr_mimebundle_()
    assert bundle["text/plain"] == repr(report)
    assert bundle["text/html"].startswith('<div class="normprobe-report">')
    assert set(report._repr_mimebundle_(exclude={"text/html"})) == {"text/plain"}
    assert set(report._repr_mimebundle_(include={"text/html"})) == {"text/html"}


def test_properties_show_the_document() -> None:
    report = Report(examples.faulty())
    assert report.gradients is report.data.measurements.gradients
    assert report.residual == report.measurements.residual
    assert report.attention == report.measurements.attention
    assert report.target.class_name == "GPT2LMHeadModel"
    assert report.skipped == report.data.skipped
    assert report.notes == ()
