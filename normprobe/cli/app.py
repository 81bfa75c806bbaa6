"""The entry point of the `normprobe` command; it loads nothing before it can answer an interrupt."""

from __future__ import annotations

import sys

from normprobe.cli.interrupt import INTERRUPTED, at_once


def main() -> None:
    """Entry point of the console script; ends the process with 0, 1 or 2, or 130 where it was interrupted."""
    try:
        with at_once():
            from normprobe.cli.commands import app
        app(prog_name="normprobe")
    except KeyboardInterrupt:
        sys.stderr.write("interrupted\n")
        sys.exit(INTERRUPTED)
