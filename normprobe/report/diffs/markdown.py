"""A comparison as Markdown."""

from __future__ import annotations

from collections.abc import Iterator

from normprobe.records.diff import DiffData
from normprobe.report.diffs import content
from normprobe.report.groups import skipped_groups
from normprobe.report.markdown import code, escape, table
from normprobe.report.places import skipped_text


def document(data: DiffData) -> str:
    """The whole comparison in GitHub's Markdown, with a newline at the end."""
    return "\n".join(_lines(data)) + "\n"


def _lines(data: DiffData) -> Iterator[str]:
    yield f"# {escape(content.title(data))}"
    yield f"\n**{escape(content.verdict_text(data))}**\n"
    for side, target in (("A", data.a), ("B", data.b)):
        yield f"- {side}: {code(content.name_of(target))}: {escape(' · '.join(content.model_facts(target)))}"
    yield f"- inputs: {escape(data.inputs) or 'none'}"
    yield f"- compared: {escape(', '.join(content.compared(data)))}"
    if data.differences:
        yield "\n## Differences\n"
    for one in data.differences:
        count = f" ({len(one.where)} places)" if len(one.where) > 1 else ""
        yield f"- **{one.severity.value} {escape(content.heading(one))}** at {code(content.places(one))}{count}  "
        yield f"  {escape(one.message)}"
    if data.output is not None:
        yield "\n## Outputs\n"
        yield escape(" · ".join(content.output_facts(data.output)))
    for each in content.tables(data):
        yield from table(each)
    if data.notes:
        yield "\n## Notes\n"
        yield from (f"- {escape(note)}" for note in data.notes)
    if data.skipped:
        yield "\n## Not looked at\n"
        groups = skipped_groups(data.skipped)
        yield from (f"- {escape(skipped_text(what, 120))}: {escape(why)}" for what, why in groups)
