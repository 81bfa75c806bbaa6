"""The commands of `normprobe`."""

from __future__ import annotations

from typing import Annotated

import typer

from normprobe.cli.audit import audit, demo
from normprobe.cli.diff import diff
from normprobe.cli.explain import explain
from normprobe.cli.order import InOrder
from normprobe.cli.patch import patch
from normprobe.cli.rules import rules
from normprobe.cli.sweep import sweep
from normprobe.cli.verify import verify
from normprobe.version import __version__

app = typer.Typer(
    name="normprobe",
    help="Tells how the signal of a PyTorch model keeps or loses its scale, and what is wrong.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
for command in (audit, demo, diff, patch, rules, explain, sweep, verify):
    app.command(cls=InOrder if command is patch else None)(command)


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"normprobe {__version__}")
        raise typer.Exit


@app.callback()
def _common(
    version: Annotated[
        bool,
        typer.Option("--version", help="Show the version and exit.", callback=_version, is_eager=True),
    ] = False,
) -> None:
    """Options before the command."""
