"""Where healthy models turn at the limits of checks, and what is said of them without a reason."""

from __future__ import annotations

import math
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks import calibrating, calibration, findings
from benchmarks.findings import problems, said_table
from benchmarks.healthy import DEEP, GROUPS, TRAINED, Healthy, entries, short
from benchmarks.margins import Turn, turns
from benchmarks.reasons import REASONS, Reason
from benchmarks.turns_table import models_text, turns_table
from normprobe.checks import find
from normprobe.records import ReportData
from tests.checks import builders as b


def turn(data: ReportData, code: str, name: str) -> Turn | None:
    return next((one for one in turns(data, [find(code)]) if one.limit == name), None)


@pytest.mark.parametrize("rms", [0.9, 1.8, 3.6])
def test_a_largest_value_turns_at_what_was_measured(rms: float) -> None:
    measured = b.residual(b.state(0), b.state(1, rms=rms), independent_rms=0.9)
    found = turn(b.document(residual=(measured,)), "NP301", "max_excess")
    assert found is not None
    assert found.rising
    assert found.at == pytest.approx(rms / 0.9, rel=0.01)


def test_a_least_value_turns_at_what_was_measured() -> None:
    measured = b.residual(*(b.state(i, write_max=size) for i, size in enumerate((1.0, 1.0, 0.03))))
    found = turn(b.document(residual=(measured,)), "NP305", "least_share")
    assert found is not None
    assert not found.rising
    assert found.at == pytest.approx(0.03, rel=0.01)


def test_other_conditions_of_a_check_hold_where_it_turns() -> None:
    """Three of four writes are idle only if four are looked at: what the third smallest share is does not matter."""
    shares = 0.01, 0.02, 0.04, 0.08, 0.3, 0.4, 0.4, 0.4
    measured = b.residual(*(b.state(i, write_share=share) for i, share in enumerate(shares)))
    found = turn(b.document(residual=(measured,)), "NP302", "least_share_at_init")
    assert found is not None
    assert found.at == pytest.approx(0.08, rel=0.01)


def test_a_check_that_never_speaks_or_always_does_turns_nowhere() -> None:
    assert list(turns(b.document(residual=()), [find("NP301")])) == []
    broken = b.residual(b.state(0), b.state(1, abs_max=math.inf))
    assert turn(b.document(residual=(broken,)), "NP304", "max_abs") is None


def row(name: str, *said: tuple[str, str, str, float], **more: Any) -> dict[str, Any]:
    found = [
        {"code": code, "name": "name", "severity": severity, "message": message, "value": value}
        for code, severity, message, value in said
    ]
    return {"name": name, "outcome": "probed", "note": "", "level": "backward", "findings": found, "turns": []} | more


SAID = row("deep:a (x)", ("NP301", "warning", "it grows", 3.0), ("NP307", "note", "lost", 1.5))


def test_a_warning_needs_a_reason_and_a_note_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(findings, "REASONS", ())
    assert problems([SAID], True) == ["deep:a (x): warning NP301 without a reason: it grows"]
    monkeypatch.setattr(findings, "REASONS", (Reason("NP301", "warning", "^deep:a", "it does"),))
    assert problems([SAID], True) == []


@pytest.mark.parametrize(
    "reason",
    [
        Reason("NP301", "note", "^deep:a", "of another severity"),
        Reason("NP302", "warning", "^deep:a", "of another check"),
        Reason("NP301", "warning", "^deep:b", "of another model"),
        Reason("NP301", "warning", "^deep:a", "of another finding", message="it shrinks"),
    ],
)
def test_a_reason_that_fits_nothing_is_told_where_all_models_were_probed(
    reason: Reason, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(findings, "REASONS", (reason,))
    assert len(problems([SAID], True)) == 2
    assert len(problems([SAID], False)) == 1


def test_a_crash_is_a_problem_and_a_model_that_is_not_built_is_none() -> None:
    crashed = {"name": "deep:a", "outcome": "crashed", "note": "KeyError"}
    assert problems([crashed, {**crashed, "outcome": "not built"}], False) == ["deep:a crashed: KeyError"]


def test_findings_are_gathered_by_reason_and_the_worst_come_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(findings, "REASONS", (Reason("NP301", "warning", "^deep:[ab]", "it does"),))
    other = row("deep:b", ("NP301", "warning", "it grows", 5.0))
    third = row("deep:c", ("NP301", "warning", "it grows", 9.0))
    assert said_table([SAID, other, third], "NP3").splitlines()[2:] == [
        "| warning NP301 name | 9 | c | **none given** |",
        "| warning NP301 name | 3 to 5 | a; b | it does |",
        "| note NP307 name | 1.5 | a |  |",
    ]
    assert said_table([SAID], "NP3", only="NP307").splitlines()[2:] == ["| note NP307 name | 1.5 | a |  |"]
    assert said_table([SAID], "NP4") == ""


def test_a_limit_is_shown_with_the_sound_models_nearest_to_it_and_those_beyond() -> None:
    def at(name: str, value: float) -> dict[str, Any]:
        return row(name, turns=[{"code": "NP301", "limit": "max_excess", "at": value, "rising": True}])

    rows = [at("deep:a", 1.2), at("deep:b", 0.5), at("truth:c", 2.5), at("trained:d", 1.33)]
    (line,) = turns_table(rows, "NP3").splitlines()[2:]
    assert line == "| NP301 `max_excess` | at most 2 | 3 | 1.2 (a); 0.5 (b) | 1: 2.5 | d 1.3 |"
    assert turns_table(rows, "NP4") == ""


def test_models_are_counted_by_group() -> None:
    lines = models_text([SAID, {"name": "deep:b", "outcome": "not built", "note": "", "level": "forward"}])
    assert "| deep, of transformers and torch | 1 | 1 | 1 |" in lines.splitlines()


def test_the_demo_has_its_planted_fault_and_is_judged_again_from_its_report(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (demo,) = entries("demo")
    first = calibrating.attempt(demo, tmp_path, lambda stage: None)
    assert [f["code"] for f in first["findings"] if f["severity"] == "error"] == ["NP201"]
    assert first["level"] == "backward"
    assert {"NP301.max_excess", "NP401.max_logit", "NP503.max_ratio"} <= {
        f"{one['code']}.{one['limit']}" for one in first["turns"]
    }
    monkeypatch.setattr(calibrating, "built", lambda entry: pytest.fail("built again"))
    assert calibrating.attempt(demo, tmp_path, lambda stage: None) == first
    assert problems([first], False) == []


def test_what_cannot_be_built_is_no_crash_and_what_cannot_be_probed_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    lost = calibrating.attempt(Healthy("deep", "no such model"), None, lambda stage: None)
    assert lost["outcome"] == "not built"
    monkeypatch.setattr(calibrating, "_probed", lambda model: {}["planted"])
    assert calibrating.attempt(*entries("demo"), None, lambda stage: None)["outcome"] == "crashed"  # type: ignore[misc]


def test_every_group_has_names_of_its_own() -> None:
    names = [one.name for group in GROUPS for one in entries(group)]
    assert len(names) == len(set(names))
    assert {f"deep:{name}" for name in DEEP} <= set(names)
    assert sum(name.startswith("registered:") for name in names) > 300
    assert short("registered:GPT2LMHeadModel (gpt2)") == "GPT2LMHeadModel"
    assert {one.model for one in entries("trained")} <= set(TRAINED)


def test_reasons_name_checks_that_exist_and_say_something() -> None:
    for one in REASONS:
        find(one.code)
        assert len(one.why) > 20
        assert one.severity in ("error", "warning", "note")


@pytest.mark.parametrize(
    ("arguments", "missing", "written"), [([], "", True), (["--only", "NP3"], "", False), ([], "truth", False)]
)
def test_the_page_is_written_by_a_run_over_all_models(
    arguments: list[str], missing: str, written: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    groups = {name: [Healthy(name, "a")] for name in GROUPS if name != missing}
    grows = ("NP301", "warning", "it grows", 3.0)
    monkeypatch.setattr(calibration, "PAGE", tmp_path / "calibration.md")
    monkeypatch.setattr(calibration, "entries", lambda group: groups.get(group, []))
    monkeypatch.setattr(calibration, "outcomes", lambda chosen, *_: [row(one.name, grows) for one in chosen])
    monkeypatch.setattr(findings, "REASONS", (Reason("NP301", "warning", "", "it is built so"),))
    monkeypatch.setattr(sys, "argv", ["calibration", *arguments])
    assert calibration.main() == 0
    assert calibration.PAGE.exists() == written
    if written:
        text = calibration.PAGE.read_text()
        assert text.index("## Models") < text.index("## Signal") < text.index("| warning NP301 name | 3 |")
    monkeypatch.setattr(findings, "REASONS", ())
    assert calibration.main() == 1
