"""The report on a terminal, made to be read in ten seconds, at any width, with or without colour."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from rich.console import Console, ConsoleOptions, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from normprobe.records import ReportData, Severity
from normprobe.report.groups import FindingGroup, finding_groups, skipped_groups
from normprobe.report.overview import broken_output, headline, leftover_facts, stream_lines
from normprobe.report.places import joined, shorten
from normprobe.report.series import Chart, Series, charts
from normprobe.report.sparks import BROKEN, spark
from normprobe.report.wording import ascii_only, number, plural, tally

STYLES = {Severity.ERROR: "bold red", Severity.WARNING: "bold yellow", Severity.NOTE: "bold cyan"}
MOST_STREAMS = 8
WIDEST = 140
_INDENT = 2


@dataclass(frozen=True)
class TerminalReport:
    """The whole report as something that a `rich.console.Console` prints.

    Args:
        data: the document.
    """

    data: ReportData

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[RenderableType]:
        page = Page(min(options.max_width, WIDEST), plain=options.ascii_only)
        yield from _verdict(page, self.data)
        yield from _anatomy(page, self.data)
        for chart in charts(self.data):
            yield from _chart(page, chart)
        yield from _findings(page, self.data)
        yield from _listed(page, "Notes", [Text(page.text(note)) for note in self.data.notes])
        yield from _listed(page, "Not looked at", _skips(page, self.data))


@dataclass(frozen=True)
class Page:
    """Room in characters, and whether the stream can hold ASCII alone."""

    width: int
    plain: bool = False

    def text(self, text: str) -> str:
        """`text` as the stream can hold it."""
        return ascii_only(text) if self.plain else text

    def fit(self, path: str, width: int) -> str:
        """`path` shortened in the middle to `width`, signs that take more room in ASCII counted."""
        return shorten(self.text(path), width) if not self.plain else self.text(shorten(path, width))[:width]


def _verdict(page: Page, data: ReportData) -> Iterator[RenderableType]:
    severities = [one.severity for one in data.findings]
    worst = min(severities, key=lambda severity: severity.rank, default=None)
    mark = "✓ " if worst is None or worst is Severity.NOTE else "✗ "
    style = STYLES[worst] if worst else "bold green"
    name = data.target.name or data.target.class_name or "model"
    verdict = Text.assemble((page.text(mark + tally(severities)), style), page.text(" · "))
    verdict.append(page.fit(name, max(20, page.width - len(verdict))), style="bold")
    yield verdict
    skips = f"{len(data.skipped)} not looked at" if data.skipped else ""
    if line := " · ".join(filter(None, (headline(data), skips))):
        yield Text(page.text(line), style="dim")
    if broken := broken_output(data):
        yield Text(page.text(broken), style="bold red")


def _title(page: Page, title: str, caption: str = "") -> Text:
    return Text.assemble(
        "\n", (page.text(title), "bold"), ("  " + page.text(caption) if caption else "", "dim")
    )


def _anatomy(page: Page, data: ReportData) -> Iterator[RenderableType]:
    anatomy = data.anatomy
    yield _title(page, "Anatomy", "" if anatomy.streams else "no residual stream was found")
    for stream in anatomy.streams[:MOST_STREAMS]:
        first, *further = stream_lines(anatomy, stream)
        name = Text(page.fit(stream.name, page.width // 2), style="bold")
        yield _hanging(Text.assemble(name, page.text(" · "), _facts(page, first)))
        for line in further:
            yield _hanging(_facts(page, line), indent=2 * _INDENT)
    rest = len(anatomy.streams) - MOST_STREAMS
    if rest > 0:
        yield _hanging(Text(f"and {plural(rest, 'more stream')}: --format json lists all", style="dim"))
    if leftover := leftover_facts(anatomy):
        yield _hanging(_facts(page, leftover))


def _facts(page: Page, facts: Sequence[str]) -> Text:
    styled = [
        Text(page.text(fact), style="bold red" if fact.startswith("NO final norm") else "") for fact in facts
    ]
    return Text(page.text(" · "), style="").join(styled)


def _hanging(line: Text, indent: int = _INDENT) -> RenderableType:
    """`line` indented, where it wraps as well."""
    grid = Table.grid(padding=0)
    grid.add_column(width=indent)
    grid.add_column(overflow="fold")
    grid.add_row("", line)
    return grid


def _chart(page: Page, chart: Chart) -> Iterator[RenderableType]:
    yield _title(page, chart.title, chart.caption)
    label = max(12, min(page.width // 4, max(len(name) for one in chart.series for name in _labels(one))))
    room = max(8, min(64, page.width - label - 31))
    for one in chart.series[:MOST_STREAMS]:
        grid = Table.grid(padding=(0, 1))
        for column in (
            {"width": _INDENT - 1},
            {"width": label},
            {"width": 8, "justify": "right"},
            {"width": room},
        ):
            grid.add_column(no_wrap=True, **column)  # type: ignore[arg-type]
        grid.add_column(no_wrap=True, width=8)
        grid.add_column(no_wrap=True)
        for row in _rows(page, one, label, room):
            grid.add_row("", *row)
        yield grid
        for caption in one.captions:
            yield _caption(page, caption)


def _labels(one: Series) -> list[str]:
    return [one.label, *([one.reference_label] if one.reference else [])]


def _caption(page: Page, caption: str) -> RenderableType:
    text = Text(page.text(caption), style="dim")
    text.highlight_regex("^NOT FINITE.*?(?=,)", "bold red")
    return Padding(text, (0, 0, 0, _INDENT))


def _rows(page: Page, one: Series, label: int, room: int) -> Iterator[tuple[Text, ...]]:
    spanned = [*one.reference, *one.values]
    yield _row(page, one.label, one.values, spanned, room=room, label=label, log=one.log, style="cyan")
    if one.reference:
        yield _row(
            page,
            one.reference_label,
            one.reference,
            spanned,
            room=room,
            label=label,
            log=one.log,
            style="dim",
        )
    if one.companion:
        yield _row(
            page, one.companion_label, one.companion, (), room=room, label=label, log=one.log, style="magenta"
        )


def _row(
    page: Page,
    name: str,
    values: Sequence[float],
    scale: Sequence[float],
    *,
    room: int,
    label: int,
    log: bool,
    style: str,
) -> tuple[Text, ...]:
    line = Text(page.text(spark(values, room, log=log, scale=scale)), style=style)
    line.highlight_regex(page.text(BROKEN), "bold red")
    first, last = values[0], values[-1]
    ratio = f"×{number(last / first)}" if log and first > 0 and math.isfinite(last / first) else ""
    return (
        Text(page.fit(name, label), style="bold" if style == "cyan" else "dim"),
        Text(page.text(number(first))),
        line,
        Text(page.text(number(last))),
        Text(page.text(ratio), style="dim"),
    )


def _findings(page: Page, data: ReportData) -> Iterator[RenderableType]:
    groups = finding_groups(data.findings)
    if not groups:
        return
    yield _title(page, "Findings")
    grid = Table.grid(padding=(0, 2, 0, 0))
    grid.add_column(width=0)
    grid.add_column(no_wrap=True)
    grid.add_column(no_wrap=True)
    grid.add_column(ratio=1, overflow="fold")
    for group in groups:
        style = STYLES[group.severity]
        grid.add_row(
            "",
            Text(group.severity.value, style=style),
            Text(group.first.code, style=style),
            _finding(page, group),
        )
    yield grid
    yield _caption(page, f"normprobe explain {groups[0].first.code} tells why it matters and what to do")


def _finding(page: Page, group: FindingGroup) -> Text:
    room = page.width - 20
    count = f" ({plural(len(group.places), 'place')})" if len(group.places) > 1 else ""
    body = Text.assemble((group.first.name, "bold"), "  ")
    body.append(page.text(joined(group.places, 2 * room)), style="cyan")
    body.append(page.text(count) + "\n")
    body.append(page.text(group.first.message))
    if group.others:
        body.append(page.text(f" (and {group.others} more like it)"))
    body.append("\n" + page.text(group.evidence), style="dim")
    if group.first.fix:
        body.append("\n" + page.text(f"mend: {group.first.fix}"), style="green")
    return body


def _skips(page: Page, data: ReportData) -> list[Text]:
    return [
        Text.assemble(page.text(joined(what, page.width - 4)), (": " + page.text(why), "dim"))
        for what, why in skipped_groups(data.skipped)
    ]


def _listed(page: Page, title: str, lines: Iterable[Text]) -> Iterator[RenderableType]:
    shown = list(lines)
    if shown:
        yield _title(page, title)
    for line in shown:
        yield _hanging(line)
