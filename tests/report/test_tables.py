"""Tables of further measures in every form of the report."""

from __future__ import annotations

import pytest

from normprobe.records import ReportData
from normprobe.report import tables
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
