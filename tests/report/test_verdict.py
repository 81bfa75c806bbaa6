"""The verdict is "clean" only where the model could be read, in every form."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest

from normprobe.checks import find, judged, run
from normprobe.records import Anatomy, Finding, Head, ReportData, Settings, Severity
from normprobe.report.render import document
from normprobe.report.report import Report
from normprobe.report.verdict import verdict
from tests.report.builders import norm, norms_of, stream

NOTHING = "nothing could be read; no norm and no residual stream was found"
NO_STREAM = "nothing found wrong; no residual stream was found"
UNDECIDED = "nothing found wrong; whether a final norm is missing could not be decided"


def found(*severities: Severity) -> tuple[Finding, ...]:
    return tuple(
        Finding(code="NP999", name="test", severity=severity, where="m", message="m", source="choice")
        for severity in severities
    )


def read(*, needs: bool | None = True, final: str | None = "model.norm", **more: object) -> ReportData:
    one = stream(needs=needs, final=final, **more)
    return ReportData(anatomy=Anatomy(streams=(one,), norms=tuple(norms_of(one))))


def both() -> ReportData:
    known, unknown = stream("a.layers"), stream("b.layers", final=None, needs=None)
    return ReportData(anatomy=Anatomy(streams=(known, unknown), norms=tuple(norms_of(known))))


CASES: dict[str, tuple[Callable[[], ReportData], str, str]] = {
    "nothing": (ReportData, "?", NOTHING),
    "weights alone": (
        lambda: ReportData(anatomy=Anatomy(head=Head(path="head.weight"))),
        "?",
        "nothing found wrong; no norm and no residual stream was found",
    ),
    "norms alone": (lambda: ReportData(anatomy=Anatomy(norms=(norm("norm"),))), "?", NO_STREAM),
    "undecided": (lambda: read(needs=None, final=None), "?", UNDECIDED),
    "one of two undecided": (both, "✓", "clean"),
    "no need": (lambda: read(needs=False, final=None), "✓", "clean"),
    "post-norm": (lambda: read(needs=None, final=None, placement="post"), "✓", "clean"),
    "whole": (read, "✓", "clean"),
}


@pytest.mark.parametrize(("data", "mark", "text"), CASES.values(), ids=CASES)
def test_every_form_says_what_was_not_read(data: Callable[[], ReportData], mark: str, text: str) -> None:
    made = data()
    assert (verdict(made).mark, verdict(made).text) == (mark, text)
    assert document(made, "rich").startswith(f"{mark} {text} · model")
    assert repr(Report(made)).startswith(f"normprobe: model: {text}\n")
    assert f"**{text}**" in document(made, "markdown")
    level = "clean" if mark == "✓" else "unread"
    assert f'<p class="np-verdict np-{level}">{text}</p>' in document(made, "html")
    assert not Report(made).failed("note")


def test_an_unread_final_norm_is_what_np201_skips() -> None:
    for make, _, text in CASES.values():
        data = make()
        skipped = run(data, [find("NP201")])[1]
        undecided = bool(data.anatomy.streams) and len(skipped) == len(data.anatomy.streams)
        assert (text == UNDECIDED) is undecided


@pytest.mark.parametrize(
    ("severities", "mark", "text"),
    [
        ((Severity.NOTE,), "?", "0 errors, 0 warnings, 1 note; no residual stream was found"),
        ((Severity.WARNING,), "!", "0 errors, 1 warning, 0 notes"),
        ((Severity.ERROR, Severity.NOTE), "✗", "1 error, 0 warnings, 1 note"),
    ],
)
def test_findings_come_first(severities: tuple[Severity, ...], mark: str, text: str) -> None:
    data = ReportData(anatomy=Anatomy(norms=(norm("norm"),)), findings=found(*severities))
    assert document(data, "rich").startswith(f"{mark} {text} · model")
    assert f'np-verdict np-{severities[0].value}">{text}<' in document(data, "html")
    assert not re.search("clean|nothing found wrong", repr(Report(data)))


def test_notes_on_a_model_that_was_read_keep_their_mark() -> None:
    said = verdict(read().model_copy(update={"findings": found(Severity.NOTE)}))
    assert (said.mark, said.text, said.level) == ("✓", "0 errors, 0 warnings, 1 note", "note")


def test_a_model_that_no_check_judged_is_not_clean() -> None:
    said = verdict(judged(read(), Settings(select=("NP607",))))
    assert (said.mark, said.text, said.blind) == ("?", "judged by no check: the settings leave none", True)
    assert verdict(judged(read(), Settings(select=("NP201",)))).mark == "✓"
