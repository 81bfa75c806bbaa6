"""The report as Markdown, for issues, pull requests and logs."""

from __future__ import annotations

import re
from collections.abc import Iterator

from normprobe.records import ReportData
from normprobe.report.groups import FindingGroup, finding_groups, left_out, skipped_groups, titled_places
from normprobe.report.overview import gaps, headline, leftover_facts, stream_facts, weights_facts
from normprobe.report.places import joined, skipped_text
from normprobe.report.series import Chart, Series, charts
from normprobe.report.sparks import spark
from normprobe.report.streams import stream_title
from normprobe.report.tables import Table, tables
from normprobe.report.verdict import verdict
from normprobe.report.wording import mend_text, number, plural

_SPARK = 48


def document(data: ReportData) -> str:
    """The whole report in GitHub's Markdown, with a newline at the end."""
    return "\n".join(_lines(data)) + "\n"


def escape(text: str) -> str:
    """`text` so that Markdown shows it as it is, on one line and also in a table."""
    return re.sub(r"([\\`*_{}\[\]<>|~#&])", r"\\\1", " ".join(text.split()))


def code(text: str) -> str:
    """`text` as a code span on one line, also where it holds backticks."""
    text = " ".join(text.split())
    fence = "`" * (max((len(run) for run in re.findall("`+", text)), default=0) + 1)
    pad = " " if text.startswith("`") or text.endswith("`") else ""
    return f"{fence}{pad}{text}{pad}{fence}"


def _lines(data: ReportData) -> Iterator[str]:
    yield f"# {escape(data.target.name or data.target.class_name or 'model')}"
    yield f"\n**{verdict(data).text}**  "
    loud = weights_facts(data)
    known = [*headline(data), *gaps(data)]
    yield " · ".join(f"**{escape(fact)}**" if fact in loud else escape(fact) for fact in known)
    yield "\n## Anatomy\n"
    for stream in data.anatomy.streams:
        facts = "; ".join(map(escape, stream_facts(data.anatomy, stream)))
        yield f"- {code(stream_title(data, stream.name))}: {facts}"
    yield from (f"- {escape(fact)}" for fact in leftover_facts(data.anatomy))
    if not data.anatomy.streams:
        yield "- no residual stream was found"
    if data.findings:
        yield "\n## Findings\n"
    for group in finding_groups(data.findings):
        yield from _finding(data, group)
    for chart in charts(data):
        yield from _chart(chart)
    for each in tables(data):
        yield from table(each)
    yield from _ends(data)


def _ends(data: ReportData) -> Iterator[str]:
    if data.notes:
        yield "\n## Notes\n"
        yield from (f"- {escape(note)}" for note in data.notes)
    if data.skipped:
        yield "\n## Not looked at\n"
        groups = skipped_groups(data.skipped)
        yield from (f"- {escape(skipped_text(what, 120))}: {escape(why)}" for what, why in groups)
    if rows := left_out(data):
        yield "\n## Left out by the settings\n"
        yield from (f"- {escape(what)}: {escape(why)}" for what, why in rows)


def _finding(data: ReportData, group: FindingGroup) -> Iterator[str]:
    first, count, mend = group.first, len(group.places), mend_text(group.findings)
    places = f" ({plural(count, 'place')})" if count > 1 else ""
    more = f" (and {group.others} more like it)" if group.others else ""
    where = code(joined(titled_places(data, group), 160))
    yield f"- **{first.severity.value} {first.code} {escape(first.name)}** at {where}{places}  "
    yield f"  {escape(first.message)}{more}  "
    yield f"  {escape(' · '.join(group.evidence))}" + ("  " if mend else "")
    if mend:
        yield f"  mend: {code(mend)}"


def _chart(chart: Chart) -> Iterator[str]:
    yield f"\n## {chart.title}\n\n{escape(chart.caption)}\n"
    for one in chart.series:
        yield from ("```text", *_rows(one), "```")
        yield from (f"- {escape(' · '.join(caption))}" for caption in one.captions)


def table(one: Table) -> Iterator[str]:
    """The lines of a table under its heading and caption."""
    yield f"\n## {escape(one.title)}\n\n{escape(one.caption)}\n"
    if not one.rows:
        return
    yield f"| {' | '.join(map(escape, one.columns))} |"
    yield f"| --- |{' ---: |' * (len(one.columns) - 1)}"
    for first, *cells in one.rows:
        yield f"| {' | '.join((code(first), *map(escape, cells)))} |"


def _rows(one: Series) -> Iterator[str]:
    reference, companion = (one.reference_label, one.reference), (one.companion_label, one.companion)
    rows = [(one.label, one.values), reference, companion]
    width = max(len(label) for label, values in rows if values)
    for label, values in rows:
        if values:
            scale = () if values is one.companion else (*one.values, *one.reference)
            line = spark(values, min(_SPARK, max(8, len(values))), log=one.log, scale=scale)
            yield f"{label.ljust(width)} {number(values[0]):>8} {line} {number(values[-1])}"
