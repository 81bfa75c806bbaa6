"""Series by depth on a terminal: a line each, with its first and its last value."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from rich.console import RenderableType
from rich.text import Text

from normprobe.report.page import INDENT, MOST_STREAMS, Page, hanging
from normprobe.report.series import Chart, Series
from normprobe.report.sparks import BROKEN, spark
from normprobe.report.wording import number, plural

_RATIO, _WIDEST, _NARROWEST = 9, 64, 8  # characters; ×1.23e-05 is the longest ratio


def chart_lines(page: Page, chart: Chart) -> Iterator[RenderableType]:
    """The title, and for each series its lines and captions; series beyond a screenful are counted."""
    yield page.title(chart.title, chart.caption)
    shown, rest = chart.series[:MOST_STREAMS], len(chart.series) - MOST_STREAMS
    layout = _Layout.of(page, shown)
    for one in shown:
        yield from layout.lines(one)
        for caption in one.captions:
            text = page.facts(caption, INDENT, style="dim")
            text.highlight_regex("^NOT FINITE.*", "bold red")
            yield hanging(text)
    if rest > 0:
        yield page.dim(f"and {plural(rest, 'more stream')}: --format json lists all")


@dataclass(frozen=True)
class _Layout:
    """Room for the names and for the bars, the same for every line of a chart.

    Where bars do not fit (`bars` is 0), a line has the numbers alone, and the name stands above them. A number is
    never cut.
    """

    page: Page
    label: int
    value: int
    bars: int

    @classmethod
    def of(cls, page: Page, series: Sequence[Series]) -> _Layout:
        names = [name for one in series for name in (one.label, one.reference_label, one.companion_label)]
        label = min(page.width // 4, max(len(page.text(name)) for name in names))
        ends = [
            curve[end]
            for one in series
            for curve in (one.values, one.reference, one.companion)
            if curve
            for end in (0, -1)
        ]
        value = max(len(page.text(number(end))) for end in ends)
        room = min(_WIDEST, page.width - INDENT - label - 2 * value - _RATIO - 4)
        return cls(page, label, value, room if room >= _NARROWEST else 0)

    def lines(self, one: Series) -> Iterator[Text]:
        """The series, its reference on the same scale, and its companion on its own."""
        shared = [*one.values, *one.reference]
        curves: tuple[tuple[str, Sequence[float], Sequence[float], str], ...] = (
            (one.label, one.values, shared, "cyan"),
            (one.reference_label, one.reference, shared, "dim"),
            (one.companion_label, one.companion, [], "magenta"),
        )
        for name, values, scale, style in curves:
            if values:
                bars = spark(values, self.bars, log=one.log, scale=scale) if self.bars else ""
                yield self._line(name, bars, values[0], values[-1], style, ratio=one.log)

    def _line(self, name: str, bars: str, first: float, last: float, style: str, *, ratio: bool) -> Text:
        page = self.page
        times = f"×{number(last / first)}" if ratio and first > 0 and math.isfinite(last / first) else ""
        emphasis = "bold" if style == "cyan" else "dim"
        if not self.bars:
            name, ends = page.fit(name, page.width - INDENT), page.text(f"{number(first)} → {number(last)} ")
            above = Text.assemble(" " * INDENT, (name, emphasis), "\n", " " * 2 * INDENT)
            return Text.assemble(above, ends, (page.text(times), "dim"), overflow="fold")
        drawn = Text(page.text(bars), style=style)
        drawn.highlight_regex(page.text(BROKEN), "bold red")
        line = Text.assemble(
            " " * INDENT,
            (page.fit(name, self.label).ljust(self.label), emphasis),
            " ",
            page.text(number(first)).rjust(self.value),
            " ",
            drawn,
            f" {page.text(number(last)).ljust(self.value)} ",
            (page.text(times), "dim"),
            no_wrap=True,
            overflow="crop",
        )
        line.rstrip()
        return line
