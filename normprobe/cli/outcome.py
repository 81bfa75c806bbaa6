"""How a command ends: its exit codes, and errors as a user can act on them."""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import typer
from rich.console import Console
from rich.text import Text

from normprobe.cli.interrupt import INTERRUPTED
from normprobe.errors import NormprobeError
from normprobe.report.lines import Lines

CLEAN, FINDINGS, FAILED = 0, 1, 2
BROKEN_PIPE = 141  # 128 + SIGPIPE, as a shell reports it


@contextmanager
def outcome(*, debug: bool = False) -> Iterator[None]:
    """Turns what was raised inside into a message on standard error and an exit code; never into a traceback.

    Args:
        debug: show the traceback as well.

    Raises:
        typer.Exit: 2 where the command could not run, 130 when it was interrupted, 141 when the reader of
            standard output has gone.
    """
    try:
        yield
    except (typer.Exit, typer.Abort):
        raise
    except BrokenPipeError:
        drop_stdout()
        raise typer.Exit(BROKEN_PIPE) from None
    except KeyboardInterrupt:
        _say(Text.assemble(("interrupted", "bold red")))
        raise typer.Exit(INTERRUPTED) from None
    except NormprobeError as error:
        _fail(error, _taught(error, debug=debug), debug=debug)
    except (Exception, SystemExit) as error:
        _fail(error, _unexpected(error, debug=debug), debug=debug)


def drop_stdout() -> None:
    """Points standard output at nothing, so that what is still buffered gives no second error at exit."""
    try:
        descriptor = sys.stdout.fileno()
    except (AttributeError, OSError, ValueError):
        return  # no real stream behind it, so nothing is flushed at exit
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, descriptor)
    os.close(nowhere)


def stderr() -> Console:
    """A console on standard error as it is now."""
    return Console(stderr=True, soft_wrap=True, highlight=False)


def _fail(error: BaseException, message: Text, *, debug: bool) -> None:
    if debug:
        traceback.print_exception(error, file=sys.stderr)
    _say(message)
    raise typer.Exit(FAILED) from None


def _taught(error: NormprobeError, *, debug: bool) -> Text:
    rows = (("expected", error.expected), ("found", error.found), ("try", error.hint))
    parts: list[Any] = [("error: ", "bold red"), error.message]
    for label, text in rows:
        if text:
            parts += ["\n  ", (f"{label}: ", "bold"), text.replace("\n", "\n    ")]
    system = isinstance(error.__cause__, OSError) and error.__cause__.errno is not None  # it has said all there is
    if error.__cause__ is not None and not system and not debug:
        parts.append(("\n  (run again with --debug to see where)", "dim"))
    return Text.assemble(*parts)


def _unexpected(error: BaseException, *, debug: bool) -> Text:
    if isinstance(error, SystemExit):
        name, text = "SystemExit", f"the code of the target ended the process with {error.code!r}"
    else:
        name, text = type(error).__name__, " ".join(str(error).split())
    hint = "" if debug else " (run again with --debug to see where)"
    return Text.assemble(("error: ", "bold red"), f"{name}: {text}", (hint, "dim"))


def _say(message: Text) -> None:
    try:
        stderr().print(Lines([message]))
    except (OSError, ValueError):
        return  # standard error is gone; the exit code is all that is left to say
