"""What the settings left out is told in every form."""

from __future__ import annotations

import pytest

from normprobe.checks import ALL
from normprobe.records import Ignored, ReportData, Settings
from normprobe.report.formats import Format, content
from normprobe.report.groups import left_out
from normprobe.report.overview import gaps
from normprobe.report.report import Report
from tests.report import examples

SILENCED = Ignored(code="NP401", name="unresolved-logits", why="in per-path-ignores of vision", findings=3)
OFF = Ignored(code="NP201", name="missing-final-norm", why="in ignore")
NEVER = Settings(limits={"NP401": {"max_logit": 60.5}}, fail_on="never", source="team.toml")


def data() -> ReportData:
    return examples.faulty().model_copy(update={"ignored": (OFF, SILENCED), "settings": NEVER})


def test_rows_name_what_was_left_out_and_the_setting() -> None:
    assert left_out(data()) == [
        ("NP201 missing-final-norm", "in ignore"),
        ("3 findings of NP401", "in per-path-ignores of vision"),
        ("NP401", "max_logit is 60.5 in limits"),
    ]
    assert left_out(examples.faulty()) == []


def test_many_checks_are_counted() -> None:
    many = tuple(Ignored(code=f"NP10{i}", name="n", why="not in select") for i in range(9))
    assert left_out(ReportData(ignored=many)) == [("9 checks", "not in select")]


def test_the_second_line_says_how_much() -> None:
    assert gaps(data())[-3:] == ["1 check left out", "3 findings left out", "settings of team.toml"]
    assert gaps(ReportData()) == []


@pytest.mark.parametrize("form", [Format.RICH, Format.HTML, Format.MARKDOWN])
def test_every_form_tells_it(form: Format) -> None:
    told = content(data(), form).replace("\\_", "_").replace("\\-", "-")
    assert "Left out by the settings" in told
    assert "in per-path-ignores of vision" in told
    assert "max_logit is 60.5 in limits" in told
    assert "settings of team.toml" in told
    assert "Left out" not in content(examples.faulty(), form)


def test_a_report_fails_as_its_settings_say() -> None:
    report = Report(data())
    assert not report.failed()
    assert report.failed("error")
    assert Report(examples.faulty()).failed()


def test_a_report_is_judged_again_without_a_new_run() -> None:
    report = Report(ReportData()).judged(Settings(select=("NP201",)))
    assert report.data.checks == ("NP201",)
    assert len(report.ignored) == len(ALL) - 1
