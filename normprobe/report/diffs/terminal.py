"""A comparison on a terminal."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.table import Table
from rich.text import Text

from normprobe.records.diff import DiffData, Difference
from normprobe.report.diffs import content
from normprobe.report.grid import table_lines
from normprobe.report.groups import skipped_groups
from normprobe.report.page import INDENT, Page, hanging
from normprobe.report.places import skipped_text
from normprobe.report.terminal import STYLES, WIDEST

_VERDICTS = {"clean": "bold green", "unread": "bold yellow"} | {key.value: style for key, style in STYLES.items()}


@dataclass(frozen=True)
class TerminalDiff:
    """The whole comparison as something that a `rich.console.Console` prints.

    Args:
        data: the document.
    """

    data: DiffData

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        page = Page(min(options.max_width, WIDEST), plain=options.ascii_only)
        for part in self._parts(page):
            yield from console.render(part, options.update(width=page.width))

    def _parts(self, page: Page) -> Iterator[RenderableType]:
        data = self.data
        yield Text(page.text(f"{content.mark(data)} {content.verdict_text(data)}"), _VERDICTS[content.level_of(data)])
        for side, target in (("A", data.a), ("B", data.b)):
            name = Text.assemble((f"{side} ", "bold"), (page.text(content.name_of(target)), "bold"))
            yield hanging(page.facts([name, *content.model_facts(target)], INDENT))
        yield hanging(page.facts([f"inputs: {data.inputs}" if data.inputs else "no inputs"], INDENT, style="dim"))
        yield hanging(page.facts(["compared: " + ", ".join(content.compared(data))], INDENT, style="dim"))
        if data.differences:
            yield page.title("Differences")
            yield _differences(page, data)
        if data.output is not None:
            yield page.title("Outputs", "as the models run")
            yield hanging(page.facts(content.output_facts(data.output), INDENT))
        for table in content.tables(data):
            yield from table_lines(page, table)
        yield from _listed(page, "Notes", [Text(page.text(note)) for note in data.notes])
        yield from _listed(page, "Not looked at", _skips(page, data))


def _differences(page: Page, data: DiffData) -> RenderableType:
    grid = Table.grid(padding=(0, 2, 0, 0))
    grid.add_column(width=0)
    grid.add_column(no_wrap=True)
    grid.add_column(overflow="fold")
    for one in data.differences:
        grid.add_row("", Text(one.severity.value, style=STYLES[one.severity]), _difference(page, one))
    return grid


def _difference(page: Page, one: Difference) -> Text:
    count = f" ({len(one.where)} places)" if len(one.where) > 1 else ""
    places = (page.text(content.places(one)), "cyan")
    return Text.assemble((content.heading(one), "bold"), "  ", places, count, "\n", page.text(one.message))


def _skips(page: Page, data: DiffData) -> list[Text]:
    return [
        Text.assemble(page.text(skipped_text(what, page.width - 4)), (": " + page.text(why), "dim"))
        for what, why in skipped_groups(data.skipped)
    ]


def _listed(page: Page, title: str, lines: list[Text]) -> Iterator[RenderableType]:
    if lines:
        yield page.title(title)
    for line in lines:
        yield hanging(line)
