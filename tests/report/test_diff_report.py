"""A comparison in every form, to JSON and back, and what it calls failed."""

from __future__ import annotations

import json
from pathlib import Path

import jsonschema
import pytest
import torch

import normprobe
from normprobe.errors import NormprobeError, SettingError
from normprobe.records.diff import DiffData, Difference, SignalDiff, SiteDiff
from normprobe.records.schema import json_schema
from normprobe.report.diffs import content
from normprobe.report.diffs.report import DiffReport
from tests.diffing.models import decoder, tokens

PUBLISHED = Path(__file__).parents[2] / "docs" / "diff.schema.json"


@pytest.fixture(scope="module")
def report() -> DiffReport:
    other = decoder()
    other.blocks[1].second.eps = 1e-3
    return normprobe.diff(decoder(), other, tokens())


def differing(severity: str) -> DiffReport:
    one = Difference(subject="norm", fact="eps", severity=severity, where=(("m", "n"),), message="told")  # type: ignore[arg-type]
    return DiffReport(DiffData(differences=(one,), verdict="same" if severity == "note" else "differs"))


@pytest.mark.parametrize("form", ["rich", "markdown", "html"])
def test_every_form_tells_what_differs(report: DiffReport, form: str) -> None:
    text = report.content(form)
    for told in ("eps", "blocks.1.second", "1e-06", "0.001", "parts first", "3 errors"):
        assert told in text
    assert text.endswith("\n")


def test_the_terminal_fits_its_width(report: DiffReport) -> None:
    lines = report.content("rich").splitlines()
    assert lines[0] == "✗ B differs from A: 3 errors, 0 warnings, 0 notes"
    assert max(map(len, lines)) <= 100


def test_html_escapes_names() -> None:
    data = DiffData(notes=("<b>",), inputs="<i>")
    page = DiffReport(data).content("html")
    assert "<b>" not in page.replace("<b> ", "")
    assert "&lt;b&gt;" in page
    assert "&lt;i&gt;" in page


def test_there_and_back(report: DiffReport, tmp_path: Path) -> None:
    report.save(tmp_path / "diff.json")
    assert DiffReport.load(tmp_path / "diff.json") == report
    for name in ("diff.html", "diff.md", "diff.txt"):
        report.save(tmp_path / name)
        assert (tmp_path / name).read_text(encoding="utf-8")
    with pytest.raises(SettingError, match=r"no format of the suffix \.pdf"):
        report.save(tmp_path / "diff.pdf")
    (tmp_path / "other.json").write_text("{}")
    with pytest.raises(NormprobeError, match="a document of schema normprobe-diff/1"):
        DiffReport.load(tmp_path / "other.json")
    with pytest.raises(NormprobeError, match="cannot read a comparison"):
        DiffReport.load(tmp_path / "none.json")


def test_the_published_schema_is_current_and_reports_satisfy_it(report: DiffReport) -> None:
    assert json.loads(PUBLISHED.read_text(encoding="utf-8")) == json_schema(DiffData), (
        "run: python -m normprobe.records.schema diff > docs/diff.schema.json"
    )
    validator = jsonschema.Draft202012Validator(json_schema(DiffData))
    validator.validate(report.to_dict())
    other = decoder()
    with torch.no_grad():
        other.norm.weight[0] = torch.nan
    broken = normprobe.diff(decoder(), other, tokens()).to_dict()
    validator.validate(broken)
    assert '"Infinity"' in json.dumps(broken)


@pytest.mark.parametrize(
    ("severity", "failing"),
    [("error", {"error", "warning", "note"}), ("warning", {"warning", "note"}), ("note", {"note"})],
)
def test_what_fails(severity: str, failing: set[str]) -> None:
    report = differing(severity)
    assert {limit for limit in ("error", "warning", "note", "never") if report.failed(limit)} == failing  # type: ignore[arg-type]
    assert report.failed() is ("warning" in failing)


@pytest.mark.parametrize(
    ("severity", "mark", "text"),
    [
        ("error", "✗", "B differs from A: 1 error, 0 warnings, 0 notes"),
        ("warning", "!", "B differs from A: 0 errors, 1 warning, 0 notes (the same function, rounded otherwise)"),
        ("note", "✓", "the same build; values were not compared: 0 errors, 0 warnings, 1 note"),
    ],
)
def test_the_verdict(severity: str, mark: str, text: str) -> None:
    data = differing(severity).data
    assert (content.mark(data), content.verdict_text(data)) == (mark, text)


def test_the_verdict_that_is_none() -> None:
    data = DiffData(verdict="unknown")
    assert content.mark(data) == "?"
    assert "not enough was compared" in content.verdict_text(data)


def test_places_name_both_models_where_they_differ() -> None:
    one = Difference(
        subject="norm", fact="eps", severity="note", where=(("m", "n"), ("q", "q"), ("", "r")), message="m"
    )  # type: ignore[arg-type]
    assert content.places(one) == "m | n, q, r"
    assert content.places(one.model_copy(update={"where": ((".", "."),)})) == "the model itself"


def sites(count: int, first: int | None) -> SignalDiff:
    rows = tuple(
        SiteDiff(
            kind="stream", a=str(i), b="b", error=0, noise=0, limit=0, step=i == first, rms_a=1, rms_b=1, cosine=1,
            count=1, exact=True,
        )
        for i in range(count)
    )  # fmt: skip
    return SignalDiff(dtype="float32", sites=rows, first=first)


def test_the_sites_that_tell_most_are_shown() -> None:
    assert list(content.telling(sites(5, None))) == [0, 1, 2, 3, 4]
    assert content.telling(sites(40, 20)) == [18, 19, 20, 21, 22, 23, 24, 38, 39]
    shown = content.telling(sites(100, None))
    assert len(shown) <= 12
    assert {0, 98, 99} <= set(shown)


def test_its_repr_is_plain(report: DiffReport) -> None:
    text = repr(report)
    assert text.isascii()
    assert "error norm eps at blocks.1.second" in text
    assert "normprobe-report" in report._repr_html_()
