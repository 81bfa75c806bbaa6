"""One table of a measure that was asked for, in a form that every renderer can show."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from normprobe.records import Measurements

Maker = Callable[[Measurements], Iterator["Table"]]


@dataclass(frozen=True)
class Table:
    """One table.

    Attributes:
        title: its heading.
        caption: the one sentence that says what is to be seen.
        columns: headings; the first column holds places, the others numbers or short words.
        rows: as text, the most telling first; none where the caption says it all.
    """

    title: str
    caption: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
