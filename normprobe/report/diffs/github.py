"""A comparison as workflow commands of GitHub Actions: a line for each difference."""

from __future__ import annotations

from collections.abc import Iterator

from normprobe.records import Severity
from normprobe.records.diff import DiffData, Difference
from normprobe.report.diffs import content
from normprobe.report.github import ROOM, command, line
from normprobe.report.groups import skipped_groups
from normprobe.report.lint import source_file
from normprobe.report.places import skipped_text


def document(data: DiffData) -> str:
    """One command for each difference, then plain lines: what was not compared, the notes, and the verdict; where too
    little was compared that is a command too."""
    return "\n".join(_lines(data)) + "\n"


def _lines(data: DiffData) -> Iterator[str]:
    yield from (_command(one, data) for one in data.differences)
    for what, why in skipped_groups(data.skipped):
        yield f"not compared: {line(skipped_text(what, ROOM))}: {line(why)}"
    yield from (f"note: {line(note)}" for note in data.notes)
    told = line(f"{content.title(data)}: {content.verdict_text(data)}")
    yield command(Severity.WARNING, "normprobe diff", told, None) if data.verdict == "unknown" else f"normprobe: {told}"


def _command(one: Difference, data: DiffData) -> str:
    text = line(f"{content.places(one)}: {one.message}")
    return command(one.severity, line(content.heading(one)), text, source_file(data.b) or source_file(data.a))
