"""The short summary that `print(report)` gives: plain ASCII, a few lines, good in logs and scripts."""

from __future__ import annotations

import math

from normprobe.records import ReportData
from normprobe.report.groups import finding_groups, titled_places
from normprobe.report.overview import weights_facts
from normprobe.report.places import joined
from normprobe.report.streams import final_norm_text, placement_text, size_text, stream_title
from normprobe.report.verdict import verdict
from normprobe.report.wording import ascii_only, number, plural

MOST_STREAMS = 6


def summary(data: ReportData) -> str:
    """One verdict line, a line a stream with its growth, the counts, and a line for each raised code.

    Weights that are no checkpoint's have a line of their own, the second.
    """
    name = data.target.name or data.target.class_name or "model"
    lines = [f"normprobe: {name}: {verdict(data).text}"]
    lines += [*(f"  {fact}" for fact in weights_facts(data)), *_streams(data), _counts(data)]
    for group in finding_groups(data.findings):
        places = joined(titled_places(data, group), 90, most=2)
        lines.append(f"  {group.severity.value} {group.first.code} {group.first.name} at {places}")
    return ascii_only("\n".join(lines))


def _streams(data: ReportData) -> list[str]:
    measured = {one.stream: one for one in data.measurements.residual if one.states}
    lines = []
    for stream in data.anatomy.streams[:MOST_STREAMS]:
        facts = (placement_text(data.anatomy, stream), size_text(stream), final_norm_text(stream))
        growth = ""
        if stream.name in measured:
            one = measured[stream.name]
            first, last = (number(one.states[end].rms_median) for end in (0, -1))
            exponent = one.growth.exponent
            growth = f", rms {first} to {last}" + ("" if math.isnan(exponent) else f" (exponent {exponent:.2f})")
        lines.append(f"  {stream_title(data, stream.name)}: {', '.join(facts)}{growth}")
    rest = len(data.anatomy.streams) - MOST_STREAMS
    return lines + ([f"  and {plural(rest, 'more stream')}"] if rest > 0 else [])


def _counts(data: ReportData) -> str:
    counts = (
        plural(len(data.anatomy.norms), "norm"),
        plural(len(data.anatomy.streams), "residual stream"),
        plural(len(data.anatomy.attention), "attention site"),
        f"{plural(sum(not one.unasked for one in data.skipped), 'thing')} skipped",
    )
    return "  " + ", ".join(counts)
