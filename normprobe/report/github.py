"""The report as workflow commands of GitHub Actions: a line for each finding, shown beside the change."""

from __future__ import annotations

from collections.abc import Iterator

from normprobe.records import Finding, ReportData, Severity
from normprobe.report.groups import left_out, skipped_groups
from normprobe.report.lint import sentence, source_file
from normprobe.report.overview import gaps
from normprobe.report.places import joined, skipped_text
from normprobe.report.streams import stream_title
from normprobe.report.verdict import verdict

_COMMANDS = {Severity.ERROR: "error", Severity.WARNING: "warning", Severity.NOTE: "notice"}
ROOM = 160


def document(data: ReportData) -> str:
    """One command for each new finding, then plain lines: what is known, what was not looked at, the
    notes, and the verdict."""
    return "\n".join(_lines(data)) + "\n"


def _lines(data: ReportData) -> Iterator[str]:
    yield from (_command(finding, data) for finding in data.findings if not finding.known)
    yield from (f"known: {_title(one)} at {_place(one, data)}" for one in data.findings if one.known)
    for what, why in skipped_groups(data.skipped):
        yield f"not looked at: {line(skipped_text(what, ROOM))}: {line(why)}"
    yield from (f"left out: {line(what)}: {line(why)}" for what, why in left_out(data))
    yield from (f"note: {line(note)}" for note in data.notes)
    name = data.target.name or data.target.class_name or "model"
    yield line(" · ".join((f"normprobe: {name}: {verdict(data).text}", *gaps(data))))


def _command(finding: Finding, data: ReportData) -> str:
    text = f"{_place(finding, data)}: {sentence(finding)}"
    return command(finding.severity, _title(finding), text, source_file(data.target))


def command(severity: Severity, title: str, text: str, file: str | None) -> str:
    """The workflow command that shows `text`, which is one line, under `title`."""
    properties = {"file": file, "title": title}
    named = ",".join(f"{key}={_property(value)}" for key, value in properties.items() if value)
    return f"::{_COMMANDS[severity]} {named}::{_data(text)}"


def _title(finding: Finding) -> str:
    return line(f"{finding.code} {finding.name}")


def _place(finding: Finding, data: ReportData) -> str:
    return line(joined([stream_title(data, place) for place in finding.every_place], ROOM))


def line(text: str) -> str:
    """`text` on one line: what follows a line's end could be read as a command."""
    return " ".join(text.split())


def _data(text: str) -> str:
    """`text` as the message of a command."""
    return text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def _property(text: str) -> str:
    """`text` as the value of a property, where colons and commas have a meaning too."""
    return _data(text).replace(":", "%3A").replace(",", "%2C")
