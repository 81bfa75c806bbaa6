"""`normprobe verify`: six classic results, measured again on this machine."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table
from rich.text import Text

from normprobe.cli import options as opt
from normprobe.cli.interrupt import at_once
from normprobe.cli.outcome import CLEAN, FINDINGS, outcome
from normprobe.cli.output import put, quiet_stdout, show
from normprobe.cli.progress import progress
from normprobe.report.wording import number

if TYPE_CHECKING:
    from normprobe.records.verification import Verified


def verify(
    format: Annotated[opt.TableChoice, typer.Option("--format", help="Form of the list.")] = opt.TableChoice.RICH,
    debug: opt.Debug = False,
    quiet: opt.Quiet = False,
) -> None:
    """Reproduce six classic results with normprobe's own measures: a check of the installation.

    Exit code 0: every number is as expected. 1: one or more is not. 2: it could not run.
    """
    with outcome(debug=debug):
        with progress(quiet=quiet) as advance, quiet_stdout():
            with at_once():
                from normprobe.verifying.run import verify as verified
            found = verified(advance)
        if format is opt.TableChoice.JSON:
            put(json.dumps([one.model_dump(mode="json") for one in found], indent=2, ensure_ascii=False) + "\n")
        else:
            show(_table(found))
        raise typer.Exit(CLEAN if all(one.ok for one in found) else FINDINGS)


def _table(found: Sequence[Verified]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="dim", expand=False)
    table.add_column("", no_wrap=True)
    table.add_column("claim")
    for title in ("measured", "expected", "within"):
        table.add_column(title, no_wrap=True, justify="right")
    result = ""
    for one in found:
        if one.result != result:
            result = one.result
            table.add_row("", Text(result, style="bold"))
        mark = Text("ok", style="bold green") if one.ok else Text("no", style="bold red")
        numbers = (number(value) for value in (one.measured, one.expected, one.tolerance))
        table.add_row(mark, Text("\n").join(_claim(one)), *numbers)
    return table


def _claim(one: Verified) -> Iterator[Text]:
    yield Text(one.claim)
    if one.note:
        yield Text(one.note, style="dim")
    yield Text(one.source, style="dim")
