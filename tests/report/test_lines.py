"""Lines hang where a terminal is too narrow for them, are broken at blanks alone, and are whole in a file."""

from __future__ import annotations

import io
import textwrap

import pytest
from rich.console import Console
from rich.text import Text

from normprobe.report.formats import rich_text
from normprobe.report.lines import HANG, Lines

PATH = "/a/path/of/somebody-who-likes/long-names/and-has/many-of_them/model.safetensors"
ROWS = [
    "short",
    "planned: FoldGains (exact: the same function; outputs move by rounding at most, and no more than that)",
    "  2 sites, 1 refused",
    "    edits model.layers.*.self_attn.q_proj.weight, and model.layers.*.self_attn.k_proj.weight beside it, too",
    f"  at {PATH}: goes into what reads it, which is said at some length here",
    f"wrote {PATH}",
    "",
    "exactly sixty columns, which is what there is place for here",
    "one more than sixty columns: a break is due before its last word",
]


def shown(rows: list[Text], width: int, terminal: bool) -> list[str]:
    console = Console(file=io.StringIO(), width=width, force_terminal=terminal, color_system=None)
    return rich_text(Lines(rows), console).splitlines()


def hanging(row: str, width: int) -> list[str]:
    """By another hand."""
    indent = " " * (len(row) - len(row.lstrip()) + HANG)
    whole = {"break_long_words": False, "break_on_hyphens": False}
    return textwrap.wrap(row, width, subsequent_indent=indent, **whole) or [""]


@pytest.mark.parametrize("width", [40, 60, 80, 400])
def test_what_wraps_hangs_and_no_word_is_broken(width: int) -> None:
    found = shown([*map(Text, ROWS)], width, terminal=True)
    assert found == [line for row in ROWS for line in hanging(row, width)]
    assert (width > 80) == (found == ROWS)


def test_what_is_no_terminal_gets_whole_lines() -> None:
    assert shown([*map(Text, ROWS)], 20, terminal=False) == ROWS


def test_a_text_of_several_lines_is_so_many() -> None:
    told = Text.assemble(("error: ", "bold"), "a b c d e f\n  ", ("found: ", "bold"), "g h")
    assert shown([told], 14, terminal=True) == ["error: a b c d", "    e f", "  found: g h"]


def test_styles_go_with_their_words() -> None:
    console = Console(file=io.StringIO(), width=14, force_terminal=True, color_system="standard")
    told = rich_text(Lines([Text.assemble("some words ", ("in bold style", "bold"))]), console)
    assert told == "some words \x1b[1min\x1b[0m\n    \x1b[1mbold style\x1b[0m\n"
