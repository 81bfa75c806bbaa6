"""A comparison as self-contained HTML."""

from __future__ import annotations

from collections.abc import Iterator
from html import escape

from normprobe.records.diff import DiffData, Difference
from normprobe.report.diffs import content
from normprobe.report.groups import skipped_groups
from normprobe.report.html import bullets, section, styled, table, whole
from normprobe.report.places import skipped_text


def fragment(data: DiffData) -> str:
    """The comparison as one `<div>` with its own styles, for the output of a notebook cell."""
    return styled("\n".join(_sections(data)))


def page(data: DiffData) -> str:
    """The comparison as a whole HTML document, with a newline at the end."""
    return whole(f"normprobe: {content.title(data)}", fragment(data))


def _sections(data: DiffData) -> Iterator[str]:
    yield f'<header><p class="np-name">{escape(content.title(data))}</p>'
    yield f'<p class="np-verdict np-{content.level_of(data)}">{escape(content.verdict_text(data))}</p>'
    for side, target in (("A", data.a), ("B", data.b)):
        facts = " · ".join((content.name_of(target), *content.model_facts(target)))
        yield f'<p class="np-dim">{side}: {escape(facts)}</p>'
    yield f'<p class="np-dim">inputs: {escape(data.inputs or "none")}</p>'
    yield f'<p class="np-dim">compared: {escape(", ".join(content.compared(data)))}</p></header>'
    if data.differences:
        yield section("Differences", "".join(map(_difference, data.differences)))
    if data.output is not None:
        yield section("Outputs", f"<p>{escape(' · '.join(content.output_facts(data.output)))}</p>", "as the models run")
    yield from (section(each.title, table(each), each.caption) for each in content.tables(data))
    if data.notes:
        yield section("Notes", bullets(map(escape, data.notes)))
    if data.skipped:
        yield section("Not looked at", bullets(_skips(data)))
    versions = " · ".join((data.schema_, *(f"{name} {version}" for name, version in data.versions.items())))
    yield f'<footer class="np-dim">{escape(versions)}</footer>'


def _difference(one: Difference) -> str:
    count = f" ({len(one.where)} places)" if len(one.where) > 1 else ""
    return (
        f'<article class="np-finding np-{one.severity.value}">'
        f'<p><span class="np-code">{one.severity.value}</span> <b>{escape(content.heading(one))}</b> '
        f"<code>{escape(content.places(one))}</code>{count}</p><p>{escape(one.message)}</p></article>"
    )


def _skips(data: DiffData) -> Iterator[str]:
    for what, why in skipped_groups(data.skipped):
        yield f'{escape(skipped_text(what, 160))}: <span class="np-dim">{escape(why)}</span>'
