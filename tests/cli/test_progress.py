from __future__ import annotations

import io

import pytest
from rich.console import Console
from rich.progress import Progress, TextColumn
from rich.text import Text

from normprobe.cli.progress import _Stages, byte_progress, progress


def test_a_stage_makes_room_for_the_next() -> None:
    console = Console(file=io.StringIO(), force_terminal=True, width=80)
    with Progress(TextColumn("{task.description}"), TextColumn("{task.fields[count]}"), console=console) as bars:
        stages = _Stages(bars)
        stages("load", 0, 0)
        stages("measure", 1, 4)
        stages("measure", 2, 4)
        (task,) = bars.tasks
        assert (task.description, task.completed, task.total, task.fields["count"]) == (
            "measure",
            2,
            4,
            "2/4",
        )
        stages("judge", 0, 0)
        (task,) = bars.tasks
        assert (task.description, task.total, task.fields["count"]) == ("judge", None, "")


def test_no_bytes_are_shown_before_they_are_known(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "120")
    with byte_progress(quiet=False) as advance:
        advance("load", 0, 0)
    assert "load" in (told := capsys.readouterr().err)
    assert [part for part in ("/?", "bytes", "0/", "-:--") if part in told] == []
    with byte_progress(quiet=False) as advance:
        advance("write", 512, 2048)
    assert "0.5/2.0 KiB" in Text.from_ansi(capsys.readouterr().err).plain


def test_nothing_is_shown_where_stderr_is_no_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    with progress(quiet=False) as advance:
        assert advance is None
    assert capsys.readouterr().err == ""


def test_quiet_silences_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    with progress(quiet=True) as advance:
        assert advance is None
