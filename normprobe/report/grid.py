"""A measure's table on a terminal: a grid where there is room, else the facts of each row under its place."""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import RenderableType
from rich.table import Table as Grid
from rich.text import Text

from normprobe.report.page import INDENT, Page, hanging
from normprobe.report.tables import Table
from normprobe.report.wording import plural

MOST_ROWS = 12
_GAP = 2  # characters between columns
_NARROWEST = 12  # characters that a place is shortened to at most


def table_lines(page: Page, table: Table) -> Iterator[RenderableType]:
    """The title and the first rows of `table`; no number is ever cut. Without rows there are no columns either."""
    yield page.title(table.title, table.caption)
    if not table.rows:
        return
    rows = tuple(tuple(map(page.text, row)) for row in table.rows[:MOST_ROWS])
    columns = tuple(map(page.text, table.columns))
    widths = [max(map(len, column)) for column in zip(columns, *rows, strict=True)]
    room = page.width - INDENT - sum(widths[1:]) - _GAP * (len(widths) - 1)
    if _distinct(page, [place for place, *_ in rows], room):
        yield _grid(page, columns, rows, min(widths[0], room))
    else:
        yield from _list(page, columns, rows)
    if (rest := len(table.rows) - MOST_ROWS) > 0:
        yield page.dim(f"and {plural(rest, 'more row')}: --format json lists all")


def _distinct(page: Page, places: list[str], room: int) -> bool:
    """Whether places still differ when they are shortened to `room` characters."""
    if room >= max(map(len, places), default=0):
        return True
    return room >= _NARROWEST and len({page.fit(place, room) for place in places}) == len(set(places))


def _grid(page: Page, columns: tuple[str, ...], rows: tuple[tuple[str, ...], ...], first: int) -> RenderableType:
    grid = Grid.grid(padding=(0, _GAP, 0, 0), pad_edge=False)
    grid.add_column(width=0)
    grid.add_column(width=first, no_wrap=True)
    for _ in columns[1:]:
        grid.add_column(justify="right", no_wrap=True)
    grid.add_row("", *(Text(column, style="dim") for column in columns))
    for place, *cells in rows:
        grid.add_row("", page.fit(place, first), *cells)
    return grid


def _list(page: Page, columns: tuple[str, ...], rows: tuple[tuple[str, ...], ...]) -> Iterator[RenderableType]:
    for place, *cells in rows:
        yield hanging(Text(page.fit(place, page.width - INDENT)))
        named = [f"{name} {cell}" for name, cell in zip(columns[1:], cells, strict=True) if cell]
        yield hanging(page.facts(named, 2 * INDENT), 2 * INDENT)
