"""Where a document goes: standard output, kept free of anything else, or a file."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from pathlib import Path

from rich.console import RenderableType

from normprobe.cli.outcome import drop_stdout
from normprobe.errors import NormprobeError
from normprobe.report.files import write_whole
from normprobe.report.formats import Format, named_by
from normprobe.report.render import document, render, write_rich, write_text
from normprobe.report.report import Report


def pick(format: Format | None, out: Path | None) -> Format:
    """The format that was asked for, else the one that the file's suffix names, else `rich`.

    Raises:
        SettingError: the suffix names no format, and none was asked for.
    """
    if format is not None:
        return format
    if out is None:
        return Format.RICH
    return named_by(out, Format.RICH, f"--out {out}", "--format says the form of a file with another suffix")


def deliver(report: Report, format: Format, out: Path | None) -> None:
    """Writes the report to `out`, whole or not at all, or to standard output where `out` is None."""
    if out is None:
        with _writing():
            render(report, format)
    else:
        write_whole(out, document(report, format))


def show(renderable: RenderableType) -> None:
    """Prints something of rich to standard output."""
    with _writing():
        write_rich(renderable, sys.stdout)


def put(text: str) -> None:
    """Prints text to standard output as UTF-8."""
    with _writing():
        write_text(text, sys.stdout)


@contextmanager
def quiet_stdout() -> Iterator[None]:
    """What is printed inside goes to standard error, from compiled code too: standard output stays pure."""
    with redirect_stdout(sys.stderr):
        if sys.__stdout__ is None or sys.__stderr__ is None:
            yield
            return
        sys.__stdout__.flush()
        kept = os.dup(1)
        try:
            os.dup2(2, 1)
            yield
        finally:
            sys.__stdout__.flush()
            os.dup2(kept, 1)
            os.close(kept)


@contextmanager
def _writing() -> Iterator[None]:
    try:
        yield
    except BrokenPipeError:
        raise
    except OSError as error:
        drop_stdout()
        raise NormprobeError(
            "cannot write to standard output", found=error.strerror or str(error), hint="--out FILE"
        ) from error
