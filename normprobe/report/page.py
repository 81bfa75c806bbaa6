"""The room that a terminal gives, and the shapes that every section of the report has there."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from normprobe.report.places import shorten
from normprobe.report.wording import ascii_only

INDENT = 2
MOST_STREAMS = 8


@dataclass(frozen=True)
class Page:
    """Room in characters, and whether the stream can hold ASCII alone.

    Args:
        width: characters in a line.
        plain: spell out what ASCII lacks.
    """

    width: int
    plain: bool = False

    def text(self, text: str) -> str:
        """`text` as the stream can hold it."""
        return ascii_only(text) if self.plain else text

    def fit(self, path: str, width: int) -> str:
        """`path` shortened in the middle to `width` characters, as the stream can hold it."""
        return self.text(shorten(path, width))[:width]

    def title(self, title: str, caption: str = "") -> Text:
        """The line above a section."""
        told = f"  {self.text(caption)}" if caption else ""
        return Text.assemble("\n", (self.text(title), "bold"), (told, "dim"))

    def facts(self, facts: Sequence[str | Text], indent: int = 0, style: str = "") -> Text:
        """Facts in a row with ` · ` between them; a new line begins between two facts where that is possible.

        Args:
            facts: text as it was written, or text that was styled and made fit already.
            indent: characters to leave free at the left.
            style: style of facts that have none.
        """
        line, used, room = Text(style=style), 0, self.width - indent - 2
        for fact in facts:
            shown = fact if isinstance(fact, Text) else Text(self.text(fact))
            between = self.text(" · ")
            if line and used + len(between) + len(shown) > room:
                fits = used + len(between.rstrip()) <= self.width - indent
                line, used = line.append((between.rstrip() if fits else "") + "\n"), 0
            elif line:
                line, used = line.append(between), used + len(between)
            line, used = line.append_text(shown), used + len(shown)
        return line

    def dim(self, text: str, indent: int = INDENT) -> RenderableType:
        """A remark."""
        return hanging(Text(self.text(text), style="dim"), indent)


def hanging(line: Text, indent: int = INDENT) -> RenderableType:
    """`line` indented, where it wraps as well."""
    grid = Table.grid(padding=0)
    grid.add_column(width=indent)
    grid.add_column(overflow="fold")
    grid.add_row("", line)
    return grid
