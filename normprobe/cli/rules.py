"""`normprobe rules` and `normprobe explain`: what the checks look for, and what the measures cost, without torch."""

from __future__ import annotations

import json
from typing import Annotated

import typer
from rich.console import Group
from rich.markdown import Markdown
from rich.table import Table
from rich.text import Text

from normprobe.cli import options as opt
from normprobe.cli.outcome import outcome
from normprobe.cli.output import put, show
from normprobe.records import Severity
from normprobe.records.extras import ABOUT, EXTRA_NAMES
from normprobe.report.terminal import STYLES

_MEASURES = "measures"
_LEVELS = Text(
    "An audit runs the model twice: one forward that is recorded, one that is measured; two forwards more where the "
    "output or a stream is not finite. --level structure: the first alone. --backward: one forward and one backward "
    "more, twice that where a gradient is not finite. --exact: no pass more. --measures: what follows, beyond these; "
    "--deep: all of it.\n"
)


def rules(
    format: Annotated[opt.TableChoice, typer.Option("--format", help="Form of the list.")] = opt.TableChoice.RICH,
    debug: opt.Debug = False,
) -> None:
    """List every check: its code, name, severity, and what it looks for."""
    with outcome(debug=debug):
        from normprobe import checks

        known = checks.rules()
        if format is opt.TableChoice.JSON:
            put(json.dumps(known, indent=2, ensure_ascii=False) + "\n")
        else:
            show(_table(known))


def explain(
    code: Annotated[str, typer.Argument(metavar="CODE", help="NP201, 201, or missing-final-norm; or measures.")],
    debug: opt.Debug = False,
) -> None:
    """Say what a check measures, why it matters, what to do, and when to ignore it.

    For "measures": what each further measure tells, and how many passes over the model it takes.
    """
    with outcome(debug=debug):
        if code.strip().lower() == _MEASURES:
            show(Group(_LEVELS, _measures()))
            return
        from normprobe import checks
        from normprobe.checks.pages import page_place

        check = checks.find(code)
        show(Group(Markdown(checks.documentation(check)), Text(f"\nAlso in {page_place(check)}", style="dim")))


def _table(known: list[dict[str, object]]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="dim", expand=False)
    for title in ("code", "severity", "name"):
        table.add_column(title, no_wrap=True)
    table.add_column("what it looks for")
    for rule in known:
        style = STYLES[Severity(str(rule["severity"]))]
        table.add_row(
            Text(str(rule["code"]), style=style),
            Text(str(rule["severity"]), style=style),
            Text(str(rule["name"]), style="bold"),
            Text(str(rule["summary"])),
        )
    return table


def _measures() -> Table:
    table = Table(box=None, pad_edge=False, header_style="dim", expand=False)
    table.add_column("measure", no_wrap=True)
    table.add_column("what it tells")
    table.add_column("passes")
    for name in EXTRA_NAMES:
        table.add_row(Text(name, style="bold"), ABOUT[name].tells, ABOUT[name].passes)
    return table
