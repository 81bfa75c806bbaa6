"""The report on a terminal, made to be read in ten seconds, at any width, with or without colour."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.table import Table
from rich.text import Text

from normprobe.records import ReportData, Severity
from normprobe.report.depth import chart_lines
from normprobe.report.grid import table_lines
from normprobe.report.groups import FindingGroup, finding_groups, left_out, skipped_groups, titled_places
from normprobe.report.overview import broken_output, gaps, headline, leftover_facts, stream_lines, weights_facts
from normprobe.report.page import INDENT, MOST_STREAMS, Page, hanging
from normprobe.report.places import joined, skipped_text
from normprobe.report.series import charts
from normprobe.report.streams import stream_title
from normprobe.report.tables import tables
from normprobe.report.verdict import verdict
from normprobe.report.wording import mend_text, plural

STYLES = {Severity.ERROR: "bold red", Severity.WARNING: "bold yellow", Severity.NOTE: "bold cyan"}
WIDEST = 140
_LEFT = 19  # characters to the left of a finding at most: severity, code and the room between


@dataclass(frozen=True)
class TerminalReport:
    """The whole report as something that a `rich.console.Console` prints.

    Args:
        data: the document.
    """

    data: ReportData

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        page = Page(min(options.max_width, WIDEST), plain=options.ascii_only)
        for part in self._parts(page):
            yield from console.render(part, options.update(width=page.width))

    def _parts(self, page: Page) -> Iterator[RenderableType]:
        yield from _verdict(page, self.data)
        yield from _anatomy(page, self.data)
        for chart in charts(self.data):
            yield from chart_lines(page, chart)
        for table in tables(self.data):
            yield from table_lines(page, table)
        yield from _judged(page, self.data)


@dataclass(frozen=True)
class TerminalFindings:
    """The findings alone, with what was not looked at and what the settings left out.

    Args:
        data: a document that holds them.
    """

    data: ReportData

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        page = Page(min(options.max_width, WIDEST), plain=options.ascii_only)
        for part in _judged(page, self.data):
            yield from console.render(part, options.update(width=page.width))


def _judged(page: Page, data: ReportData) -> Iterator[RenderableType]:
    yield from _findings(page, data)
    yield from _listed(page, "Notes", [Text(page.text(note)) for note in data.notes])
    yield from _listed(page, "Not looked at", _reasons(page, _skips(page, data)))
    yield from _listed(page, "Left out by the settings", _reasons(page, left_out(data)))


def _verdict(page: Page, data: ReportData) -> Iterator[RenderableType]:
    said = verdict(data)
    style = STYLES[said.worst] if said.worst else "bold green" if said.read else "bold yellow"
    name = data.target.name or data.target.class_name or "model"
    line = Text.assemble((page.text(f"{said.mark} {said.text}"), style), page.text(" · "))
    line.append(page.fit(name, max(20, page.width - len(line))), style="bold")
    yield line
    if known := [*headline(data), *gaps(data)]:
        loud = weights_facts(data)
        yield page.facts(
            [Text(page.text(fact), style="not dim bold yellow") if fact in loud else fact for fact in known],
            style="dim",
        )
    if broken := broken_output(data):
        yield Text(page.text(broken), style="bold red")


def _anatomy(page: Page, data: ReportData) -> Iterator[RenderableType]:
    anatomy = data.anatomy
    yield page.title("Anatomy", "" if anatomy.streams else "no residual stream was found")
    for stream in anatomy.streams[:MOST_STREAMS]:
        first, *further = stream_lines(anatomy, stream)
        name = Text(page.fit(stream_title(data, stream.name), page.width // 2), style="bold")
        yield hanging(page.facts([name, *first], INDENT))
        for line in further:
            yield hanging(page.facts([_fact(page, fact) for fact in line], 2 * INDENT), 2 * INDENT)
    rest = len(anatomy.streams) - MOST_STREAMS
    if rest > 0:
        yield page.dim(f"and {plural(rest, 'more stream')}: --format json lists all")
    if leftover := leftover_facts(anatomy):
        yield hanging(page.facts(leftover, INDENT))


def _fact(page: Page, fact: str) -> Text:
    return Text(page.text(fact), style="bold red" if fact.startswith("NO final norm") else "")


def _findings(page: Page, data: ReportData) -> Iterator[RenderableType]:
    groups = finding_groups(data.findings)
    if not groups:
        return
    yield page.title("Findings")
    grid = Table.grid(padding=(0, 2, 0, 0))
    grid.add_column(width=0)
    grid.add_column(no_wrap=True)
    grid.add_column(no_wrap=True)
    grid.add_column(overflow="fold")
    for group in groups:
        style = STYLES[group.severity]
        severity, code = Text(group.severity.value, style=style), Text(group.first.code, style=style)
        grid.add_row("", severity, code, _finding(page, data, group))
    yield grid
    yield page.dim(f"normprobe explain {groups[0].first.code} tells why it matters and what to do")


def _finding(page: Page, data: ReportData, group: FindingGroup) -> Text:
    count = f" ({plural(len(group.places), 'place')})" if len(group.places) > 1 else ""
    body = Text.assemble((group.first.name, "bold"), "  ")
    body.append(page.text(joined(titled_places(data, group), max(page.width // 2, 2 * page.width - 40))), style="cyan")
    body.append(page.text(count) + "\n")
    body.append(page.text(group.first.message))
    if group.others:
        body.append(page.text(f" (and {group.others} more like it)"))
    body.append("\n")
    body.append_text(page.facts(group.evidence, _LEFT, style="dim"))
    if mend := mend_text(group.findings):
        body.append("\n" + page.text(f"mend: {mend}"), style="green")
    return body


def _skips(page: Page, data: ReportData) -> list[tuple[str, str]]:
    return [(skipped_text(what, page.width - 4), why) for what, why in skipped_groups(data.skipped)]


def _reasons(page: Page, rows: Iterable[tuple[str, str]]) -> list[Text]:
    return [Text.assemble(page.text(what), (": " + page.text(why), "dim")) for what, why in rows]


def _listed(page: Page, title: str, lines: Iterable[Text]) -> Iterator[RenderableType]:
    shown = list(lines)
    if shown:
        yield page.title(title)
    for line in shown:
        yield hanging(line)
