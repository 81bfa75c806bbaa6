"""The reviewed texts of the terminal report; `python -m tests.report.golden` writes them anew."""

from __future__ import annotations

import io
from pathlib import Path

from rich.console import Console

from normprobe.report.formats import rich_text
from normprobe.report.terminal import TerminalReport
from tests.report import examples

CASES = [(name, width) for name in examples.ALL for width in (80, 120)]


def path(name: str, width: int) -> Path:
    return Path(__file__).with_name("golden") / f"{name}_{width}.txt"


def text(name: str, width: int) -> str:
    console = Console(file=io.StringIO(), width=width, color_system=None, force_terminal=False)
    return rich_text(TerminalReport(examples.ALL[name]()), console)


if __name__ == "__main__":
    for case in CASES:
        path(*case).parent.mkdir(exist_ok=True)
        path(*case).write_text(text(*case), encoding="utf-8")
