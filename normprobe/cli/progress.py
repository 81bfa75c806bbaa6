"""Progress on standard error: one line, gone when the work is done."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import RenderableType
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    ProgressColumn,
    SpinnerColumn,
    Task,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)

from normprobe.cli.outcome import stderr

Advance = Callable[[str, int, int], None]


@contextmanager
def progress(*, quiet: bool) -> Iterator[Advance | None]:
    """Gives a function (stage, done, total) that shows how far the work is, or None to show nothing.

    Args:
        quiet: show nothing; nothing is shown either where standard error is no terminal.
    """
    console = stderr()
    if quiet or not console.is_terminal:
        yield None
        return
    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(bar_width=24),
        TextColumn("{task.fields[count]}"),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console, transient=True, redirect_stdout=False) as bars:
        yield _Stages(bars)


@contextmanager
def byte_progress(*, quiet: bool) -> Iterator[Advance]:
    """As `progress` for work that is counted in bytes, with their rate and the time left once they are known."""
    console = stderr()
    if quiet or not console.is_terminal:
        yield lambda stage, done, total: None
        return
    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(bar_width=24),
        *map(_OfBytes, (DownloadColumn(binary_units=True), TransferSpeedColumn(), TimeRemainingColumn())),
    )
    with Progress(*columns, console=console, transient=True, redirect_stdout=False) as bars:
        yield _Stages(bars)


class _OfBytes(ProgressColumn):
    """A column that is empty while it is not known how many bytes there are."""

    def __init__(self, column: ProgressColumn) -> None:
        super().__init__()
        self.column = column

    def render(self, task: Task) -> RenderableType:
        """As rich calls it."""
        return "" if task.total is None else self.column.render(task)


class _Stages:
    """One bar for the stage that runs now; a stage that ends makes room for the next."""

    def __init__(self, bars: Progress) -> None:
        self.bars = bars
        self.stage = ""
        self.task: TaskID | None = None

    def __call__(self, stage: str, done: int, total: int) -> None:
        known = total if total > 0 else None
        if stage != self.stage or self.task is None:
            if self.task is not None:
                self.bars.remove_task(self.task)
            self.stage, self.task = stage, self.bars.add_task(stage, total=known, count="")
        count = f"{done}/{total}" if known else ""
        self.bars.update(self.task, completed=done, total=known, count=count)
