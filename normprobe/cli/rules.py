"""`normprobe rules`: what the checks look for, without torch."""

from __future__ import annotations

import json
from typing import Annotated, Any

import typer
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
    """List every check: its code, name, severity, what it looks for, and the rewrites that mend it."""
    with outcome(debug=debug):
        from normprobe import checks

        known = checks.rules()
        if format is opt.TableChoice.JSON:
            put(json.dumps(known, indent=2, ensure_ascii=False) + "\n")
        else:
            show(_table(known))


def _table(known: list[dict[str, Any]]) -> Table:
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
            _told(rule),
        )
    return table


def _told(rule: dict[str, Any]) -> Text:
    """What a check looks for, and the rewrites that mend it."""
    names = " and ".join(one["rewrite"] for one in rule["fixes"])
    return Text.assemble(rule["summary"], (f" Mended by {names}." if names else "", "green"))
