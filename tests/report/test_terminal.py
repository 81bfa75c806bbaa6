"""What the terminal shows, held against texts that were read and found right.

After a wanted change: `python -m tests.report.golden`, and read the difference.
"""

from __future__ import annotations

import io
import re

import pytest
from rich.console import Console

from normprobe.records import Anatomy, Finding, ReportData, Severity
from normprobe.report.terminal import TerminalReport
from tests.report import examples
from tests.report.builders import measured, stream
from tests.report.golden import CASES, path, text


@pytest.mark.parametrize(("name", "width"), CASES)
def test_the_report_reads_as_it_was_reviewed(name: str, width: int) -> None:
    assert text(name, width) == path(name, width).read_text(encoding="utf-8")


@pytest.mark.parametrize("name", examples.ALL)
@pytest.mark.parametrize("width", [40, 60, 80, 100, 200])
def test_no_line_is_wider_than_the_terminal(name: str, width: int) -> None:
    assert max(map(len, text(name, width).splitlines())) <= width


@pytest.mark.parametrize("name", examples.ALL)
def test_a_stream_without_unicode_gets_ascii(name: str) -> None:
    raw = io.BytesIO()
    stream = io.TextIOWrapper(raw, encoding="ascii", errors="strict")
    Console(file=stream, width=80).print(TerminalReport(examples.ALL[name]()))
    stream.flush()
    shown = raw.getvalue().decode("ascii")
    assert shown.splitlines()[0][:1] in "+x?"
    assert max(map(len, shown.splitlines())) <= 80


def coloured(name: str, **more: str) -> str:
    console = Console(file=io.StringIO(), width=80, force_terminal=True, color_system="truecolor", _environ=more)
    console.print(TerminalReport(examples.ALL[name]()))
    return console.file.getvalue()  # type: ignore[attr-defined]


def test_colour_says_the_same_words() -> None:
    plain = re.sub(r"\x1b\[[0-9;]*m", "", coloured("faulty"))
    assert [line.rstrip() for line in plain.splitlines()] == text("faulty", 80).splitlines()
    assert "\x1b[1;31m" in coloured("faulty")


def test_no_color_is_respected() -> None:
    assert "\x1b[1;31m" not in coloured("faulty", NO_COLOR="1")


def test_markup_in_names_and_messages_stays_text() -> None:
    finding = Finding(
        code="NP999",
        name="test",
        severity=Severity.ERROR,
        where="[bold]a[/bold]",
        message="[red]b[/]",
        source="[c]",
    )
    console = Console(file=io.StringIO(), width=80)
    console.print(TerminalReport(ReportData(findings=(finding,), notes=("[/x]",))))
    shown = console.file.getvalue()  # type: ignore[attr-defined]
    assert "[bold]a[/bold]" in shown
    assert "[red]b[/]" in shown
    assert "[/x]" in shown


def test_streams_beyond_a_screenful_are_counted_not_dropped() -> None:
    streams = tuple(stream(f"tower_{i}.layers", 2) for i in range(11))
    data = ReportData(
        anatomy=Anatomy(streams=streams),
        measurements=examples.clean().measurements.model_copy(
            update={
                "residual": tuple(measured(one, [1.0, 2.0, 3.0, 4.0], [1.0] * 4) for one in streams),
                "attention": (),
            }
        ),
    )
    console = Console(file=io.StringIO(), width=100)
    console.print(TerminalReport(data))
    assert console.file.getvalue().count("and 3 more streams") == 2  # type: ignore[attr-defined]


def test_findings_of_one_code_share_a_row_with_their_range() -> None:
    shown = text("faulty", 120)
    assert shown.count("NP401") == 1
    assert "transformer.h.10–11.attn (2 places)" in shown
    assert "measured 55.7 to 66.9 logit · limit 50 logit" in shown


def test_errors_come_first() -> None:
    codes = re.findall(r"NP\d{3}", text("faulty", 80).split("Findings")[1])
    assert codes[:4] == ["NP106", "NP201", "NP208", "NP401"]
