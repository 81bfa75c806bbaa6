"""NP303."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import final

from normprobe.checks.base import Check, Needs, Outcome, Unit, limit, number
from normprobe.records import Finding, MassiveActivation, ReportData, Severity, StreamMeasure


@final
@dataclass(frozen=True)
class MassiveActivations(Check):
    """A few entries of the residual stream are hundreds of times larger than its median.

    ## What it measures

    For single channels of single tokens: the largest |x| over the median |x| of the same state of the stream,
    with channel, position, and the first and last write between which it stands out.

    ## Why it matters

    It is a known property of trained pre-norm language models and no divergence: attention uses these
    entries, mostly at the first token, as a constant. But statistics that average over tokens describe them
    instead of the model, 8-bit grids scaled by the maximum lose every other entry, and float16 may not hold
    them (NP304).

    ## What to do

    Nothing to the model. Use medians over tokens, quantise with outlier channels set apart, and leave the
    first token out of activation statistics.

    ## When to ignore it

    When no activation is quantised or averaged.

    ## References

    Sun et al. 2024 (Massive Activations in Large Language Models), sec. 2; Dettmers et al. 2022 (LLM.int8),
    sec. 4; Xiao et al. 2024 (attention sinks).
    """

    code, name, severity, since = "NP303", "massive-activations", Severity.NOTE, "0.1.0"
    needs = Needs.STRUCTURE | Needs.FORWARD

    max_ratio: float = limit(
        100.0,
        unit=Unit.RATIO,
        source="choice: a tenth of the roughly 1,000 times the median of Sun et al. 2024, sec. 2, "
        "so that small models show theirs",
    )

    def check(self, data: ReportData) -> Outcome:
        """Yield one note for every stream in which entries stand out."""
        if not data.measurements.residual:
            yield self.skip("no residual stream was measured")
        for stream in data.measurements.residual:
            entries = [entry for entry in stream.massive if self.exceeds(entry.ratio, self.max_ratio)]
            if entries:
                yield self._found(stream, entries)

    def _found(self, stream: StreamMeasure, entries: list[MassiveActivation]) -> Finding:
        worst = max(entries, key=lambda entry: entry.ratio if math.isfinite(entry.ratio) else math.inf)
        first, last = (_path(stream, index) for index in (worst.first, worst.last))
        more = ""
        if len(entries) > 1:
            channels, positions = ({getattr(e, name) for e in entries} for name in ("channel", "position"))
            where = f"in {_plural(channels, 'channel')} at {_plural(positions, 'position')}"
            more = f"; {len(entries)} entries stand out, {where}"
        return self.finding(
            first,
            f"channel {worst.channel} at position {worst.position} holds {number(worst.value)}, "
            f"{number(worst.ratio)} times the median |x| of the stream, up to {last}{more}",
            value=worst.ratio,
            against="max_ratio",
        )


def _plural(found: set[int], noun: str) -> str:
    return f"{len(found)} {noun}" if len(found) == 1 else f"{len(found)} {noun}s"


def _path(stream: StreamMeasure, index: int) -> str:
    return stream.states[index].path if 0 <= index < len(stream.states) else stream.stream
