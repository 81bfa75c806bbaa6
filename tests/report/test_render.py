from __future__ import annotations

import io
import json
from html.parser import HTMLParser

import pytest

from normprobe.report import svg
from normprobe.report.formats import Format
from normprobe.report.markdown import code, escape
from normprobe.report.render import document, render
from normprobe.report.report import Report
from tests.report import examples

VOID = {"meta", "br"}
DRAWN = {"line", "polyline", "circle", "path"}


class WellFormed(HTMLParser):
    """Fails on a tag that is closed out of turn, and keeps the text and the attributes."""

    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.open: list[str] = []
        self.seen: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append((tag, dict(attrs)))
        assert tag in DRAWN, tag

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data if not self.open or self.open[-1] != "style" else ""


def parsed(name: str) -> WellFormed:
    parser = WellFormed()
    parser.feed(document(examples.ALL[name](), "html"))
    parser.close()
    return parser


@pytest.mark.parametrize("name", examples.ALL)
def test_html_is_well_formed_and_loads_nothing(name: str) -> None:
    page = parsed(name)
    assert page.open == []
    for tag, attributes in page.seen:
        assert tag not in {"script", "link", "img", "iframe"}
        assert not {"src", "href", "onclick"} & set(attributes)


def test_what_the_user_wrote_is_escaped() -> None:
    page = parsed("not_finite")
    assert page.text.count("<b>evil</b>&.py:build") == 2
    assert "<b>evil" not in document(examples.not_finite(), "html")
    assert "<script> & co. stay text." in page.text


@pytest.mark.parametrize(("name", "charts"), [("clean", 2), ("faulty", 3), ("empty", 0), ("three_streams", 7)])
def test_every_series_has_a_chart(name: str, charts: int) -> None:
    assert sum(tag == "figure" for tag, _ in parsed(name).seen) == charts


def test_a_value_that_is_not_finite_breaks_the_line_and_shows_as_a_cross() -> None:
    page = parsed("not_finite")
    crosses = [attributes for tag, attributes in page.seen if attributes.get("class") == "np-broken"]
    assert len(crosses) == 8 + 1
    drawn = " ".join(str(value) for _, attributes in page.seen for value in attributes.values())
    assert "nan" not in drawn.replace("nan at last", "").replace("nan at first", "").lower()


def test_curves_are_drawn_run_by_run() -> None:
    def points(name: str, style: str) -> list[int]:
        curves = [a for tag, a in parsed(name).seen if tag == "polyline" and a["class"] == style]
        return [len(str(curve["points"]).split()) for curve in curves]

    assert points("clean", "np-series") == [60, 30]
    assert points("clean", "np-reference") == [60]
    assert points("not_finite", "np-series") == [4]
    assert points("not_finite", "np-reference") == [12]


def test_points_lie_inside_the_chart() -> None:
    for name in examples.ALL:
        for tag, attributes in parsed(name).seen:
            if tag == "circle":
                assert 58 <= float(attributes["cx"] or "nan") <= svg.WIDTH - 12
                assert 10 - 1e-6 <= float(attributes["cy"] or "nan") <= 162 + 1e-6


@pytest.mark.parametrize("name", examples.ALL)
@pytest.mark.parametrize("format", list(Format))
def test_every_format_names_the_findings_and_ends_with_a_newline(name: str, format: Format) -> None:
    data = examples.ALL[name]()
    text = document(data, format)
    assert text.endswith("\n")
    assert not text.endswith("\n\n")
    assert all(finding.code in text for finding in data.findings)


def test_json_is_what_the_report_gives() -> None:
    report = Report(examples.clean())
    assert json.loads(document(report, "json")) == json.loads(report.to_json())


@pytest.mark.parametrize("format", list(Format))
def test_documents_are_utf_8_whatever_the_stream_says(format: Format) -> None:
    raw = io.BytesIO()
    stream = io.TextIOWrapper(raw, encoding="ascii", errors="strict")
    render(examples.clean(), format, stream)
    shown = raw.getvalue().decode("ascii" if format is Format.RICH else "utf-8")
    assert "NP303" in shown


def test_a_pipe_gets_neither_colour_nor_blanks_at_line_ends() -> None:
    stream = io.StringIO()
    render(examples.faulty(), "rich", stream)
    assert "\x1b" not in stream.getvalue()
    assert all(line == line.rstrip() for line in stream.getvalue().splitlines())


def test_an_unknown_format_is_refused() -> None:
    with pytest.raises(ValueError, match="'pdf' is not a valid Format"):
        render(examples.clean(), "pdf", io.StringIO())


def test_markdown_shows_text_as_it_is() -> None:
    assert escape("a_b *c* |d|\n# e") == r"a\_b \*c\* \|d\| \# e"
    assert code("a`b") == "``a`b``"
    assert code("`") == "`` ` ``"
    assert "\\<b\\>evil\\</b\\>" in document(examples.not_finite(), "markdown")
