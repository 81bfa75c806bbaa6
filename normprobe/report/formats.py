"""The forms that a report can take, the file suffixes that name them, and the content of such a file."""

from __future__ import annotations

import io
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING

from normprobe.errors import SettingError
from normprobe.records import ReportData
from normprobe.report import github, html, junit, markdown, sarif

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

FILE_WIDTH = 100


class Format(str, Enum):
    """The forms that a report can take."""

    RICH = "rich"
    JSON = "json"
    HTML = "html"
    MARKDOWN = "markdown"
    SARIF = "sarif"
    GITHUB = "github"
    JUNIT = "junit"


SUFFIXES = {
    ".json": Format.JSON,
    ".html": Format.HTML,
    ".htm": Format.HTML,
    ".md": Format.MARKDOWN,
    ".txt": Format.RICH,
    ".sarif": Format.SARIF,
    ".xml": Format.JUNIT,
}


def named_by(path: Path, otherwise: Format, name: str, hint: str) -> Format:
    """The format that the suffix of `path` names, `otherwise` where it has none.

    Args:
        path: a file.
        otherwise: the format of a file without a suffix.
        name: how an error calls the file.
        hint: what an error says to do.

    Raises:
        SettingError: the suffix names no format.
    """
    if not path.suffix:
        return otherwise
    if path.suffix.lower() not in SUFFIXES:
        raise SettingError(
            f"{name}: no format of the suffix {path.suffix}",
            expected=", ".join(SUFFIXES),
            found=path.suffix,
            hint=hint,
        )
    return SUFFIXES[path.suffix.lower()]


def content(data: ReportData, format: Format) -> str:
    """A report as the content of a file, with a newline at the end; `rich` is text of 100 columns without colour."""
    match format:
        case Format.JSON:
            return data.model_dump_json(by_alias=True, indent=2) + "\n"
        case Format.HTML:
            return html.page(data)
        case Format.MARKDOWN:
            return markdown.document(data)
        case Format.SARIF:
            return sarif.document(data)
        case Format.GITHUB:
            return github.document(data)
        case Format.JUNIT:
            return junit.document(data)
        case Format.RICH:
            from rich.console import Console  # draws a random number as it is imported, which a probe must not

            from normprobe.report.terminal import TerminalReport

            console = Console(file=io.StringIO(), width=FILE_WIDTH, color_system=None, force_terminal=False)
            return rich_text(TerminalReport(data), console)


def rich_text(renderable: RenderableType, console: Console) -> str:
    """What `console` would print; lines end where their text ends when it is no terminal."""
    with console.capture() as captured:
        console.print(renderable, crop=False)  # a word that is longer than a line is not lost
    text = captured.get()
    if console.is_terminal:
        return text
    return "".join(line.rstrip() + "\n" for line in text.splitlines())
