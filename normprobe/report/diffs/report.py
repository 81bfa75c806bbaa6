"""The result of a comparison, as a user holds it."""

from __future__ import annotations

import io
import json
import os
from pathlib import Path
from typing import Any, final

from normprobe.records import FailOn, Severity, Skipped
from normprobe.records.diff import DIFF_SCHEMA, DiffData, Difference, OutputDiff, SignalDiff, Verdict, WeightPair
from normprobe.report.diffs import content, github, html, junit, markdown, sarif
from normprobe.report.documents import read_document
from normprobe.report.files import write_whole
from normprobe.report.formats import FILE_WIDTH, Format, named_by, rich_text
from normprobe.report.wording import ascii_only

_MOST = 12


@final
class DiffReport:
    """In what one model, B, is not as another, A.

    Args:
        data: the document behind the report; it is frozen and holds no tensors.
    """

    def __init__(self, data: DiffData) -> None:
        self.data = data

    @property
    def verdict(self) -> Verdict:
        """ "same", "differs", or "unknown" where not enough could be compared."""
        return self.data.verdict

    @property
    def complete(self) -> bool:
        """Whether enough was compared to call the models the same; where not, an error may be unseen."""
        return self.data.complete

    @property
    def differences(self) -> tuple[Difference, ...]:
        """Every fact that A and B do not share, the worst first."""
        return self.data.differences

    @property
    def signal(self) -> SignalDiff | None:
        """Both signals site by site; None where they were not compared."""
        return self.data.signal

    @property
    def output(self) -> OutputDiff | None:
        """How far the outputs are apart as the models run; None where they were not compared."""
        return self.data.output

    @property
    def weights(self) -> tuple[WeightPair, ...]:
        """Weights and biases that stand at the same place."""
        return self.data.weights

    @property
    def skipped(self) -> tuple[Skipped, ...]:
        """What was not compared, and why."""
        return self.data.skipped

    def failed(self, fail_on: FailOn | Severity | None = None) -> bool:
        """Whether there is a difference at least as bad as `fail_on`.

        Args:
            fail_on: "error" (another function), "warning" (other rounding too), "note" (another form too) or "never";
                None for what the document says, which is "warning" unless the command line said otherwise.

        Raises:
            ValueError: `fail_on` is none of these.
        """
        limit = fail_on or self.data.fail_on
        if limit == "never":
            return False
        worst = Severity(limit)
        return any(one.fails(worst) for one in self.differences)

    def to_dict(self) -> dict[str, Any]:
        """The document as plain dicts, lists, strings and numbers, in the shape of `normprobe-diff/1`."""
        plain: dict[str, Any] = json.loads(self.to_json())
        return plain

    def to_json(self, indent: int | None = 2) -> str:
        """The document as JSON text, without a newline at the end; numbers that are not finite are strings.

        Args:
            indent: spaces for each level, None for one line.
        """
        return self.data.model_dump_json(by_alias=True, indent=indent)

    def content(self, format: Format | str) -> str:
        """The comparison as the content of a file, with a newline at the end; `rich` is text of 100 columns.

        Raises:
            ValueError: `format` is none of the forms.
        """
        form = Format(format)
        if form is Format.JSON:
            return self.to_json() + "\n"
        return _FORMS[form](self.data)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the comparison; the file appears whole or not at all.

        Args:
            path: the file, in a folder that exists; its suffix names the form: .json (or none), .html, .md, .txt,
                .sarif or .xml (JUnit).

        Raises:
            SettingError: no form has that suffix.
            NormprobeError: it cannot be written there.
        """
        place = Path(path)
        form = named_by(place, Format.JSON, f"cannot save to `{place}`", "report.to_json() gives the text to write")
        write_whole(path, self.content(form))

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> DiffReport:
        """Reads a document that `save` or `--format json` wrote.

        Raises:
            NormprobeError: there is no such file, or it is no document of `normprobe-diff/1`.
        """
        hint = "normprobe diff A B --format json --out FILE"
        return cls(read_document(path, "a comparison", DIFF_SCHEMA, DiffData.model_validate, hint=hint))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, DiffReport) and self.to_json() == other.to_json()

    def __hash__(self) -> int:
        return hash(self.to_json())

    def __repr__(self) -> str:
        lines = [f"normprobe diff: {content.title(self.data)}: {content.verdict_text(self.data)}"]
        for one in self.differences[:_MOST]:
            lines.append(f"  {one.severity.value} {content.heading(one)} at {content.places(one)}: {one.message}")
        rest = len(self.differences) - _MOST
        return ascii_only("\n".join([*lines, *([f"  and {rest} more"] if rest > 0 else [])]))

    def _repr_html_(self) -> str:
        return html.fragment(self.data)


def _text(data: DiffData) -> str:
    from rich.console import Console  # draws a random number as it is imported

    from normprobe.report.diffs.terminal import TerminalDiff

    console = Console(file=io.StringIO(), width=FILE_WIDTH, color_system=None, force_terminal=False)
    return rich_text(TerminalDiff(data), console)


_FORMS = {
    Format.RICH: _text,
    Format.HTML: html.page,
    Format.MARKDOWN: markdown.document,
    Format.SARIF: sarif.document,
    Format.GITHUB: github.document,
    Format.JUNIT: junit.document,
}
