"""What was not looked at, and what was not asked for."""

from __future__ import annotations

import pytest

import normprobe
from normprobe.demo.model import build
from normprobe.records import Finding, ReportData, Severity, Skipped
from normprobe.report.formats import Format, content
from normprobe.report.groups import finding_groups, skipped_groups
from normprobe.report.overview import gaps
from normprobe.report.report import Report

UNREAD = Skipped(what="vision", why="it could not be read")
GRADIENTS = [Skipped(what=f"NP50{i} name", why="needs gradients", unasked="gradients (--backward)") for i in (1, 2)]
OPTIMISER = Skipped(what="NP114 name", why="none was given", unasked="an optimiser (--optimizer)")


def test_what_was_not_asked_for_is_one_row_behind_the_others() -> None:
    assert skipped_groups([OPTIMISER, UNREAD, *GRADIENTS]) == [
        (("vision",), "it could not be read"),
        (("not asked for",), "an optimiser (--optimizer): NP114 · gradients (--backward): NP501, NP502"),
    ]
    assert skipped_groups([UNREAD]) == [(("vision",), "it could not be read")]


def test_many_checks_are_counted() -> None:
    many = [Skipped(what=f"NP3{i:02} name", why="no signal", unasked="the signal (--level forward)") for i in range(9)]
    assert skipped_groups(many) == [(("not asked for",), "the signal (--level forward): 9 checks")]


def test_what_was_not_asked_for_is_no_gap() -> None:
    assert gaps(ReportData(skipped=(OPTIMISER, *GRADIENTS))) == []
    assert gaps(ReportData(skipped=(OPTIMISER, UNREAD))) == ["1 not looked at"]


@pytest.fixture(scope="module")
def demo() -> Report:
    return normprobe.probe(*build())


@pytest.mark.parametrize("form", [Format.RICH, Format.HTML, Format.MARKDOWN, Format.GITHUB])
def test_a_default_audit_names_each_option_once(demo: Report, form: Format) -> None:
    told = " ".join(content(demo.data, form).split()).replace("\\", "")
    assert told.count("--backward") == told.count("--optimizer") == 1
    assert "pass optimizer=" not in told


def test_the_document_keeps_every_skip_with_its_reason(demo: Report) -> None:
    skipped = {one.what.split()[0]: one for one in demo.skipped}
    assert {"NP114", "NP115", "NP501", "NP502", "NP503"} <= skipped.keys()
    assert "pass optimizer=" in skipped["NP114"].why
    assert skipped["NP501"].unasked == "gradients (--backward)"


def test_findings_that_stand_on_different_limits_are_apart() -> None:
    """A channel that is large at most tokens and an entry that is large at one have a limit each."""
    found = [
        Finding(
            code="NP303",
            name="massive-activations",
            severity=Severity.NOTE,
            where=where,
            message="it stands out",
            value=value,
            limit=limit,
            source=source,
        )
        for value, limit, source, where in (
            (54.0, 20.0, "Dettmers", "a"),
            (13067.0, 100.0, "Sun", "b"),
            (30.0, 20.0, "Dettmers", "c"),
        )
    ]
    channels, entries = finding_groups(found)
    assert (channels.places, entries.places) == (("a", "c"), ("b",))
    assert channels.evidence[:2] == ["measured 30 to 54", "limit 20"]
    assert entries.evidence[:2] == ["measured 13067", "limit 100"]
