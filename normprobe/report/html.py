"""The report as self-contained HTML: a fragment for notebooks, a page for files."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from html import escape

from normprobe.records import ReportData
from normprobe.report.groups import FindingGroup, finding_groups, left_out, skipped_groups, titled_places
from normprobe.report.overview import broken_output, gaps, headline, leftover_facts, stream_lines, weights_facts
from normprobe.report.places import joined, skipped_text
from normprobe.report.series import Chart, Series, charts
from normprobe.report.streams import stream_title
from normprobe.report.style import CSS
from normprobe.report.svg import chart
from normprobe.report.tables import Table, tables
from normprobe.report.verdict import verdict
from normprobe.report.wording import mend_text, plural


def fragment(data: ReportData) -> str:
    """The report as one `<div>` with its own styles, for the output of a notebook cell."""
    return styled("\n".join(_sections(data)))


def page(data: ReportData) -> str:
    """The report as a whole HTML document, with a newline at the end."""
    return whole(f"normprobe: {_name(data)}", fragment(data))


def styled(body: str) -> str:
    """`body` in a `<div>` with the styles of a report."""
    return f'<div class="normprobe-report"><style>{CSS}</style>\n{body}\n</div>'


def whole(title: str, body: str) -> str:
    """A whole HTML document around what `styled` gave, with a newline at the end."""
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        '<meta name="color-scheme" content="light dark">'
        f"<title>{escape(title)}</title></head>\n"
        f'<body class="normprobe-page">\n{body}\n</body></html>\n'
    )


def _name(data: ReportData) -> str:
    return data.target.name or data.target.class_name or "model"


def _sections(data: ReportData) -> Iterator[str]:
    said = verdict(data)
    known = [*headline(data), *gaps(data)]
    yield f'<header><p class="np-name">{escape(_name(data))}</p>'
    yield f'<p class="np-verdict np-{said.level}">{said.text}</p>'
    if loud := weights_facts(data):
        yield f'<p class="np-loud">{escape(" · ".join(loud))}</p>'
        known = [fact for fact in known if fact not in loud]
    yield f'<p class="np-dim">{escape(" · ".join(known))}</p>'
    if broken := broken_output(data):
        yield f'<p class="np-broken-text">{escape(broken)}</p>'
    yield "</header>"
    if data.findings:
        yield section("Findings", "".join(_finding(data, group) for group in finding_groups(data.findings)))
    yield section("Anatomy", "".join(_anatomy(data)))
    yield from (section(one.title, _chart(one), one.caption) for one in charts(data))
    yield from (section(one.title, table(one), one.caption) for one in tables(data))
    if data.notes:
        yield section("Notes", bullets(map(escape, data.notes)))
    if data.skipped:
        yield section("Not looked at", bullets(_reasons(_skips(data))))
    if rows := left_out(data):
        yield section("Left out by the settings", bullets(_reasons(rows)))
    yield f'<footer class="np-dim">{escape(_versions(data))}</footer>'


def section(title: str, body: str, caption: str = "") -> str:
    """A part of a report under its title; `body` is HTML, the rest is text."""
    told = f' <span class="np-dim">{escape(caption)}</span>' if caption else ""
    return f'<section><p class="np-title">{escape(title)}{told}</p>{body}</section>'


def bullets(items: Iterable[str]) -> str:
    """A list of what is HTML already."""
    return "<ul>" + "".join(f"<li>{item}</li>" for item in items) + "</ul>"


def _skips(data: ReportData) -> list[tuple[str, str]]:
    return [(skipped_text(what, 160), why) for what, why in skipped_groups(data.skipped)]


def _reasons(rows: Iterable[tuple[str, str]]) -> Iterator[str]:
    for what, why in rows:
        yield f'{escape(what)}: <span class="np-dim">{escape(why)}</span>'


def _versions(data: ReportData) -> str:
    return " · ".join((data.schema_, *(f"{name} {version}" for name, version in data.versions.items())))


def _finding(data: ReportData, group: FindingGroup) -> str:
    first, count, mend = group.first, len(group.places), mend_text(group.findings)
    places = f" ({plural(count, 'place')})" if count > 1 else ""
    more = f" (and {group.others} more like it)" if group.others else ""
    fix = f'<p class="np-fix">mend: <code>{escape(mend)}</code></p>' if mend else ""
    return (
        f'<article class="np-finding np-{first.severity.value}">'
        f'<p><span class="np-code">{first.severity.value} {first.code}</span> <b>{escape(first.name)}</b> '
        f"<code>{escape(joined(titled_places(data, group), 160))}</code>{places}</p>"
        f"<p>{escape(first.message)}{more}</p>"
        f'<p class="np-dim">{escape(" · ".join(group.evidence))}</p>{fix}</article>'
    )


def _anatomy(data: ReportData) -> Iterator[str]:
    anatomy = data.anatomy
    if not anatomy.streams:
        yield '<p class="np-dim">no residual stream was found</p>'
    for stream in anatomy.streams:
        lines = "".join(f"<li>{_facts(line)}</li>" for line in stream_lines(anatomy, stream))
        yield f"<p><code>{escape(stream_title(data, stream.name))}</code></p><ul>{lines}</ul>"
    if leftover := leftover_facts(anatomy):
        yield f"<p>{_facts(leftover)}</p>"


def _facts(facts: Iterable[str]) -> str:
    return " · ".join(
        f'<b class="np-broken-text">{escape(fact)}</b>' if fact.startswith("NO final norm") else escape(fact)
        for fact in facts
    )


def _chart(one: Chart) -> str:
    return '<div class="np-charts">' + "".join(map(_figure, one.series)) + "</div>"


def table(one: Table) -> str:
    """A table; nothing where its caption says it all."""
    if not one.rows:
        return ""
    head = "".join(f"<th>{escape(column)}</th>" for column in one.columns)
    body = "".join(
        f"<tr><td><code>{escape(first)}</code></td>{''.join(f'<td>{escape(cell)}</td>' for cell in cells)}</tr>"
        for first, *cells in one.rows
    )
    return f'<table class="np-table"><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>'


def _figure(one: Series) -> str:
    curves = [("np-series", one.label)]
    curves += [("np-reference", one.reference_label)] if one.reference else []
    curves += [("np-companion", one.companion_label)] if one.companion else []
    key = '<svg class="np-key" viewBox="0 0 22 8"><line class="{}" x1="0" x2="22" y1="4" y2="4"/></svg>'
    legend = "".join(f"<span>{key.format(style)} {escape(label)}</span>" for style, label in curves)
    captions = "".join(f"<br>{escape(' · '.join(caption))}" for caption in one.captions)
    return (
        f'<figure>{chart(one)}<figcaption class="np-dim"><span class="np-legend">{legend}</span>{captions}'
        "</figcaption></figure>"
    )
