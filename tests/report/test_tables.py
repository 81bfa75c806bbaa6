"""Tables of further measures in every form of the report."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from normprobe.records import ReportData
from normprobe.report import tables
from normprobe.report.grid import table_lines
from normprobe.report.page import Page
from normprobe.report.render import document
from normprobe.report.tables import Table

ROWS = tuple((f"model.layers.{i}.norm", f"{i}.5", "yes") for i in range(20))


@pytest.fixture
def data(monkeypatch: pytest.MonkeyPatch) -> ReportData:
    table = Table("Norms <at> work", "one row a norm", ("norm", "slope", "ok"), ROWS)
    monkeypatch.setattr(tables, "MAKERS", (lambda measured: iter([table]),))
    return ReportData()


def test_the_terminal_shows_the_first_rows_and_says_how_many_there_are(data: ReportData) -> None:
    text = document(data, "rich")
    assert "Norms <at> work  one row a norm" in text
    assert "model.layers.11.norm  11.5  yes" in " ".join(text.split("\n")).replace("   ", "  ")
    assert "model.layers.12.norm" not in text
    assert "and 8 more rows: --format json lists all" in text


def test_markdown_and_html_show_all(data: ReportData) -> None:
    markdown, html = document(data, "markdown"), document(data, "html")
    assert "## Norms \\<at\\> work" in markdown
    assert "| `model.layers.19.norm` | 19.5 | yes |" in markdown
    assert "Norms &lt;at&gt; work" in html
    assert html.count("<tr>") == 21


def test_a_narrow_terminal_gets_every_number_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = tuple((f"model.layers.{i}.input_layernorm", "0.123456", "truncated normal") for i in range(3))
    table = Table("Norms", "one row a norm", ("norm", "slope", "distribution"), rows)
    page = Console(file=io.StringIO(), width=44)
    for part in table_lines(Page(44), table):
        page.print(part)
    lines = page.file.getvalue().splitlines()  # type: ignore[attr-defined]
    assert max(map(len, lines)) <= 44
    assert [line.strip() for line in lines[2:4]] == ["model.layers.0.input_layernorm", "slope 0.123456 ·"]
    assert sum("truncated normal" in line for line in lines) == 3


def test_places_that_would_look_alike_are_not_shortened() -> None:
    rows = tuple((f"{'a' * 20}.{i}.{'b' * 40}", "1") for i in range(3))
    shown = Console(file=io.StringIO(), width=44)
    for part in table_lines(Page(44), Table("T", "", ("norm", "slope"), rows)):
        shown.print(part)
    assert "slope 1" in shown.file.getvalue()  # type: ignore[attr-defined]
