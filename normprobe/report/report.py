"""The result of a probe, as a user holds it."""

from __future__ import annotations

import os
from enum import Enum
from pathlib import Path
from typing import Any, final

from normprobe.checks import judged
from normprobe.records import (
    SCHEMA,
    Anatomy,
    AttentionMeasure,
    FailOn,
    Finding,
    GradientMeasure,
    Ignored,
    Initialisation,
    Measurements,
    ReportData,
    Settings,
    Severity,
    Skipped,
    StreamMeasure,
    Target,
)
from normprobe.records.precision import PrecisionMeasure
from normprobe.report.baseline import against, baseline_text, extended, read_baseline, standing
from normprobe.report.documents import read_document
from normprobe.report.files import write_whole
from normprobe.report.formats import Format, content, named_by
from normprobe.report.html import fragment
from normprobe.report.plain import summary


@final
class Report:
    """Everything that one probe found: what the model is built of, what its signal does, and what is wrong.

    Printing it gives a short summary, a notebook shows it with charts, and `normprobe.report.render.render` prints
    it in full.

    Args:
        data: the document behind the report; it is frozen and holds no tensors.
    """

    def __init__(self, data: ReportData) -> None:
        self.data = data

    @property
    def target(self) -> Target:
        """What was probed, and with which inputs."""
        return self.data.target

    @property
    def anatomy(self) -> Anatomy:
        """Norms, residual streams and attention sites, as read from the data flow."""
        return self.data.anatomy

    @property
    def measurements(self) -> Measurements:
        """Everything that was measured."""
        return self.data.measurements

    @property
    def residual(self) -> tuple[StreamMeasure, ...]:
        """Each measured residual stream, after every write; empty where the level asked for none."""
        return self.data.measurements.residual

    @property
    def attention(self) -> tuple[AttentionMeasure, ...]:
        """Attention logits by site and head; empty where the level asked for none."""
        return self.data.measurements.attention

    @property
    def gradients(self) -> GradientMeasure | None:
        """Gradients by depth, or None where no backward pass was asked for."""
        return self.data.measurements.gradients

    @property
    def init(self) -> Initialisation | None:
        """How the weights were drawn; None where that was not looked at."""
        return self.data.measurements.init

    @property
    def precision(self) -> PrecisionMeasure | None:
        """The measure "precision"; None where it was not asked for."""
        return self.data.measurements.precision

    @property
    def findings(self) -> tuple[Finding, ...]:
        """What is wrong, with the place, the value, the limit and its source."""
        return self.data.findings

    @property
    def skipped(self) -> tuple[Skipped, ...]:
        """What was not looked at, and why."""
        return self.data.skipped

    @property
    def ignored(self) -> tuple[Ignored, ...]:
        """Checks that the settings left out, wholly or at some places."""
        return self.data.ignored

    @property
    def notes(self) -> tuple[str, ...]:
        """What to know when reading the report, such as where the weights or the inputs came from."""
        return self.data.notes

    @property
    def worst(self) -> Severity | None:
        """The worst severity among the findings, None when there are none."""
        return min((one.severity for one in self.findings), key=lambda severity: severity.rank, default=None)

    def failed(self, fail_on: FailOn | Severity | None = None) -> bool:
        """Whether there is a finding at least as bad as `fail_on` that no baseline knows.

        Args:
            fail_on: "error", "warning", "note" or "never"; None for what the settings of the report say.

        Raises:
            ValueError: `fail_on` is none of these.
        """
        limit = fail_on or self.data.settings.fail_on
        if limit == "never":
            return False
        worst = Severity(limit)
        return any(one.fails(worst) for one in self.findings)

    def judged(self, settings: Settings) -> Report:
        """The same report under other settings: what was measured stays, and the checks judge it anew.

        Args:
            settings: which checks run, where they speak, and by which limits.

        Raises:
            SettingError: the settings name a check or a limit that does not exist.
        """
        return Report(judged(self.data, settings))

    def save_baseline(self, path: str | os.PathLike[str]) -> None:
        """Writes all findings as a baseline, which later reports can be held against.

        Entries that stand there of checks that did not run or could not look this time are kept.

        Args:
            path: the file, in a folder that exists.

        Raises:
            NormprobeError: it cannot be written there, or what is there is no baseline.
        """
        write_whole(path, baseline_text(extended(self.data, standing(path))))

    def against(self, path: str | os.PathLike[str]) -> Report:
        """The same report with the findings marked that a baseline knows; `failed` looks at the others alone.

        Args:
            path: a file that `save_baseline` or `--write-baseline` wrote.

        Raises:
            SettingError: there is no such file, or it is no baseline.
        """
        return Report(against(self.data, read_baseline(path)))

    def to_dict(self) -> dict[str, Any]:
        """The document as plain dicts, lists, strings and numbers, in the shape of `normprobe-report/1`.

        Numbers stay numbers, so a value that is not finite is a float `nan` or `inf` here; `to_json` writes
        those as the strings "NaN", "Infinity" and "-Infinity", since JSON has no such numbers.
        """
        return {key: _plain(value) for key, value in self.data.model_dump(by_alias=True).items()}

    def to_json(self, indent: int | None = 2) -> str:
        """The document as JSON text (RFC 8259), without a newline at the end.

        Args:
            indent: spaces for each level, None for one line.
        """
        return self.data.model_dump_json(by_alias=True, indent=indent)

    def to_html(self) -> str:
        """The report as one HTML page that needs no other file."""
        return content(self.data, Format.HTML)

    def to_markdown(self) -> str:
        """The report as Markdown."""
        return content(self.data, Format.MARKDOWN)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the report; the file appears whole or not at all.

        Args:
            path: the file, in a folder that exists. Its suffix names the form: .json (or none) for the document that
                `load` reads, .html, .md, .sarif, .xml (JUnit), or .txt for what a terminal shows.

        Raises:
            SettingError: no form has that suffix.
            NormprobeError: it cannot be written there.
        """
        place = Path(path)
        form = named_by(place, Format.JSON, f"cannot save to `{place}`", "report.to_json() gives the text to write")
        write_whole(path, content(self.data, form))

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Report:
        """Reads a document that `save` or `--format json` wrote.

        Args:
            path: the file.

        Raises:
            NormprobeError: there is no such file, it is not JSON, or not a document of `normprobe-report/1`.
        """
        hint = "normprobe audit TARGET --format json --out FILE"
        parts = ("target", "anatomy")
        return cls(read_document(path, "a report", SCHEMA, _parsed, parts=parts, hint=hint))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Report) and self.to_json() == other.to_json()

    def __hash__(self) -> int:
        return hash(self.to_json())

    def __repr__(self) -> str:
        return summary(self.data)

    def _repr_html_(self) -> str:
        return fragment(self.data)

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> dict[str, str]:
        bundle = {"text/plain": repr(self), "text/html": self._repr_html_()}
        return {
            kind: text
            for kind, text in bundle.items()
            if (not include or kind in include) and kind not in (exclude or ())
        }


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return value.value if isinstance(value, Enum) else value


def _parsed(document: dict[str, Any]) -> ReportData:
    return ReportData.model_validate(_with_numbers(document))


def _with_numbers(document: Any) -> Any:
    """The document with non-finite values of findings as numbers again; these fields may hold text too."""
    if not isinstance(document, dict) or not isinstance(document.get("findings"), list):
        return document
    names = {name: float(name.lower()) for name in ("NaN", "Infinity", "-Infinity")}

    def restored(finding: Any) -> Any:
        if not isinstance(finding, dict):
            return finding
        texts = {key: finding[key] for key in ("value", "limit") if isinstance(finding.get(key), str)}
        return finding | {key: names.get(text, text) for key, text in texts.items()}

    return document | {"findings": [restored(finding) for finding in document["findings"]]}
