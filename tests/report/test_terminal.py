"""What the terminal shows, held against texts that were read and found right.

After a wanted change: `python -m tests.report.golden`, and read the difference.
"""

from __future__ import annotations

import io
import re

import pytest
from rich.console import Console

from normprobe.records import Anatomy, Finding, ReportData, Severity, Skipped
from normprobe.report.formats import rich_text
from normprobe.report.render import document
from normprobe.report.report import Report
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
    assert shown.splitlines()[0][:1] in "+x?!"
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


@pytest.mark.parametrize("name", ["clean", "faulty", "three_streams"])
@pytest.mark.parametrize("width", [40, 60])
def test_a_narrow_terminal_cuts_no_number(name: str, width: int) -> None:
    """What a wide terminal shows as the ends and the ratio of a series stands in the narrow report as well."""
    lines = text(name, 140).splitlines()
    ratios = re.findall(r"×\S+$", "\n".join(line for line in lines if "█" in line), re.MULTILINE)
    assert ratios
    assert set(ratios) <= set(text(name, width).split())


def test_a_long_name_and_small_numbers_do_not_touch() -> None:
    one = stream("model.decoder.layers", 4)
    small = measured(one, [5.13e-05 * (k + 1) for k in range(8)], [1.23e-04] * 8)
    data = ReportData(anatomy=Anatomy(streams=(one,)), measurements={"residual": (small,)})  # type: ignore[arg-type]
    for width in (40, 60, 80):
        console = Console(file=io.StringIO(), width=width, color_system=None)
        assert {"5.13e-05", "×8"} <= set(rich_text(TerminalReport(data), console).split())


def test_every_skipped_check_is_named_whole() -> None:
    whats = [f"NP{code} some-check-of-that-code" for code in range(101, 109)]
    data = ReportData(skipped=tuple(Skipped(what=what, why="nothing was measured") for what in whats))
    console = Console(file=io.StringIO(), width=40, color_system=None)
    told = " ".join(rich_text(TerminalReport(data), console).split())
    assert ", ".join(whats) in told


def test_every_mend_is_a_call_of_the_package() -> None:
    import normprobe
    from normprobe.checks import ALL

    fixes = {check.fix for check in ALL if check.fix}
    assert fixes
    assert fixes <= set(normprobe.__all__)


@pytest.mark.parametrize("note", ["random weights (seed 3)", "2 of 29 tensors not in the checkpoint"])
@pytest.mark.parametrize("format", ["rich", "html", "markdown"])
def test_weights_that_are_no_checkpoint_s_stand_in_the_target_line(note: str, format: str) -> None:
    told = examples.clean().model_copy(update={"notes": (f"{note}: more of it", "random text")})
    head = document(told, format).split("Anatomy")[0]
    assert note in head
    assert "more of it" not in head
    assert "random text" not in head
    assert repr(Report(told)).splitlines()[1] == f"  {note}"


def test_entropy_over_one_key_is_undefined_and_over_a_nan_not_finite() -> None:
    margins = {"std": 0.0, "entropy": 0.0, "saturated": 0.0, "first_token": 0.0}

    def shown(*tops: tuple[float, float]) -> str:
        heads = [
            {"head": k, "sampled_max": top, "bound": 9.0, "std": 1.0, "entropy": value, "saturated": value}
            | {"first_token": 1.0, "uncapped_max": top, "q_rms": 1.0, "k_rms": 1.0, "margins": margins}
            for k, (top, value) in enumerate(tops)
        ]
        site = {"path": "a", "rows": 1, "basis": {"unit": "logit", "dtype": "float32", "count": 1}, "heads": heads}
        data = ReportData.model_validate({"measurements": {"attention": [site]}})
        return document(data, "rich")

    nan = float("nan")
    assert "entropy / ln(keys) undefined (one key)" in shown((1.0, nan))
    assert "1 row a head" in shown((1.0, nan))
    assert "entropy / ln(keys) 0.5, 1 undefined (one key)" in shown((1.0, nan), (1.0, 0.5))
    assert "entropy / ln(keys) 1 not finite" in shown((nan, nan))
