"""Lines of text that a terminal shows with a hanging indent, and that are whole wherever else they go."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderResult
from rich.text import Text

HANG = 4  # more than the two by which lines are indented that tell more of the one above
# All that would move the cursor, colour what follows or turn its direction; tabs and ends of lines are meant.
_STEERING = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u2028-\u202e\u2066-\u2069]")


@dataclass(frozen=True)
class Lines:
    """Lines that a terminal breaks at blanks alone, so that paths and commands can be copied from it.

    Control characters, which a name of a tensor or file may have, are shown escaped and steer no terminal.

    Args:
        lines: what each wraps to is indented further than its beginning.
    """

    lines: Iterable[Text]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        for line in (_escaped(each) for given in self.lines for each in given.split("\n", allow_blank=True)):
            for part in _wrapped(line, options.max_width) if console.is_terminal else [line]:
                part.no_wrap, part.overflow = True, "ignore"
                yield part


def _escaped(line: Text) -> Text:
    """`line` with its styles, and with control characters by their codes."""
    found = line.blank_copy()
    ends = {end for each in _STEERING.finditer(line.plain) for end in each.span()} - {0, len(line)}
    for part in line.divide(sorted(ends)):
        if _STEERING.fullmatch(part.plain):
            code = repr(part.plain)[1:-1]
            part = Text(code, part.style, spans=[span._replace(end=len(code)) for span in part.spans])
        found.append_text(part)
    return found


def _wrapped(line: Text, width: int) -> Iterator[Text]:
    indent = len(line.plain) - len(line.plain.lstrip(" ")) + HANG
    first, *others = line.divide(_breaks(line.plain, width, indent))
    for part in (first, *(Text(" " * indent).append_text(other) for other in others)):
        part.rstrip()
        yield part


def _breaks(plain: str, width: int, indent: int) -> Iterator[int]:
    """Where words stand that do not fit behind those before."""
    begin, room = 0, width
    for word in re.finditer(r"\S+", plain):
        if plain[begin : word.start()].strip() and cell_len(plain[begin : word.end()]) > room:
            yield word.start()
            begin, room = word.start(), width - indent
