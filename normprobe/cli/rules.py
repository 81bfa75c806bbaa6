"""`normprobe rules` and `normprobe explain CODE`: what the checks look for. Neither loads torch."""

from __future__ import annotations

import json
from typing import Annotated

import typer
from rich.markdown import Markdown
from rich.table import Table
from rich.text import Text

from normprobe.cli import options as opt
from normprobe.cli.outcome import outcome
from normprobe.cli.output import put, show
from normprobe.records import Severity
from normprobe.report.terminal import STYLES


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
    code: Annotated[str, typer.Argument(metavar="CODE", help="NP201, 201, or missing-final-norm.")],
    debug: opt.Debug = False,
) -> None:
    """Say what a check measures, why it matters, what to do, and when to ignore it."""
    with outcome(debug=debug):
        from normprobe import checks

        show(Markdown(checks.documentation(checks.find(code))))


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
