"""The entry point of the `normprobe` command; it loads nothing before it can answer an interrupt."""

from __future__ import annotations

import gc
import os
import sys

from normprobe.cli.interrupt import INTERRUPTED, at_once


def settle() -> None:
    """What a process that does nothing else is best run with; to be called before torch is loaded.

    Threads of torch that wait for each other do so asleep, as the work beside them needs their processor; cycles, of
    which libraries make few as they load, are looked for less often.
    """
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    gc.set_threshold(100_000, 20, 20)


def main() -> None:
    """Entry point of the console script; ends the process with 0, 1 or 2, or 130 where it was interrupted."""
    try:
        settle()
        with at_once():
            from normprobe.cli.commands import app
        app(prog_name="normprobe")
    except KeyboardInterrupt:
        sys.stderr.write("interrupted\n")
        sys.exit(INTERRUPTED)
