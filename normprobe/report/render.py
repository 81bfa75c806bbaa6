"""The one place that picks a renderer and writes what it gives."""

from __future__ import annotations

import sys
from typing import TextIO

from rich.console import Console, RenderableType

from normprobe.records import ReportData
from normprobe.report.formats import Format, content, rich_text
from normprobe.report.report import Report
from normprobe.report.terminal import TerminalReport
from normprobe.report.wording import ascii_only


def render(report: Report | ReportData, format: Format | str = Format.RICH, stream: TextIO | None = None) -> None:
    """Writes the report to `stream`, which for `rich` decides on colour, width and encoding.

    Args:
        report: a report or the document inside it.
        format: "rich", "json", "html", "markdown", "sarif", "github" or "junit".
        stream: a text stream, standard output by default; a terminal gets colour unless NO_COLOR is set.

    Raises:
        ValueError: `format` is none of these.
        OSError: the stream could not be written to.
    """
    stream = sys.stdout if stream is None else stream
    if Format(format) is Format.RICH:
        write_rich(TerminalReport(_data(report)), stream)
    else:
        write_text(document(report, format), stream)


def document(report: Report | ReportData, format: Format | str) -> str:
    """The report as the content of a file, with a newline at the end.

    `rich` is text of 100 columns without colour here.

    Args:
        report: a report or the document inside it.
        format: "rich", "json", "html", "markdown", "sarif", "github" or "junit".

    Raises:
        ValueError: `format` is none of these.
    """
    return content(_data(report), Format(format))


def write_rich(renderable: RenderableType, stream: TextIO) -> None:
    """Writes `renderable` with the colours and the width that `stream` has, and only signs that it can hold."""
    text = rich_text(renderable, Console(file=stream))
    try:
        text.encode(stream.encoding or "utf-8", stream.errors or "strict")
    except UnicodeEncodeError:
        text = ascii_only(text)
    stream.write(text)
    stream.flush()


def write_text(text: str, stream: TextIO) -> None:
    """Writes `text` as UTF-8 whatever the locale says, since JSON, HTML and Markdown are defined so."""
    buffer = getattr(stream, "buffer", None)
    if buffer is None:
        stream.write(text)
    else:
        stream.flush()
        buffer.write(text.encode("utf-8"))
    stream.flush()


def _data(report: Report | ReportData) -> ReportData:
    return report.data if isinstance(report, Report) else report
