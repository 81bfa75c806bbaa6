"""NP303."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import final

from normprobe.checks.base import Check, Needs, Outcome, Unit, limit, number
from normprobe.records import Finding, MassiveActivation, OutlierChannel, ReportData, Severity, StreamMeasure


@final
@dataclass(frozen=True)
class MassiveActivations(Check):
    """Entries or channels of the residual stream are far larger than the rest of it.

    ## What it measures

    For single channels of single tokens: the largest |x| over the median |x| of the same state of the stream, with
    channel, position, its share of the squared norm of its token, and the first and last write between which it stands
    out. For whole channels, which are large at most tokens: the median |x| of the channel over up to 32 sampled tokens,
    over the median of these over all channels (from 32 channels on).

    ## Why it matters

    Both are known properties of trained models and no divergence: attention uses the entries, mostly at the first
    token, as a constant, and channels carry what all tokens share. But statistics that average over tokens describe
    them instead of the model, cosines between tokens too. A grid of integers that is scaled by the largest value of a
    token has steps of largest/127 in 8 bits: at a ratio of 254 the median entry rounds to zero, at 20 six steps are
    left for it. 8-bit floats have a range of 2¹⁴ at full precision and lose nothing at such ratios. float16 may not
    hold the largest (NP304).

    ## What to do

    Nothing to the model. Use medians over tokens, leave the first token out of activation statistics, quantise with the
    named channels set apart or rotated away, or in 8-bit floats.

    ## When to ignore it

    When no activation is quantised or averaged.

    ## References

    Sun et al. 2024 (Massive Activations in Large Language Models), sec. 2; Dettmers et al. 2022 (LLM.int8), sec. 4;
    Xiao et al. 2024 (attention sinks); Micikevicius et al. 2022 (FP8 formats), table 1.
    """

    code, name, severity, since = "NP303", "massive-activations", Severity.NOTE, "0.1.0"
    needs = Needs.STRUCTURE | Needs.FORWARD

    max_ratio: float = limit(
        100.0,
        unit=Unit.RATIO,
        least=100.0,
        source="choice: a tenth of the roughly 1,000 times the median of Sun et al. 2024, sec. 2, "
        "so that small models show theirs",
    )

    max_channel_ratio: float = limit(
        20.0,
        unit=Unit.RATIO,
        least=20.0,
        source="Dettmers et al. 2022 (LLM.int8), sec. 1: outlier features up to 20 times the others",
    )

    def check(self, data: ReportData) -> Outcome:
        """Yield one note for every stream in which entries stand out, and one for that in which channels do."""
        if not data.measurements.residual:
            yield self.skip("no residual stream was measured")
        for stream in data.measurements.residual:
            entries = [entry for entry in stream.massive if self.exceeds(entry.ratio, self.max_ratio)]
            if entries:
                yield self._entries(stream, entries)
            channels = [one for one in stream.outliers if self.exceeds(one.ratio, self.max_channel_ratio)]
            if channels:
                yield self._channels(stream, channels)

    def _channels(self, stream: StreamMeasure, channels: list[OutlierChannel]) -> Finding:
        worst = max(channels, key=lambda one: one.ratio if math.isfinite(one.ratio) else math.inf)
        others = f"; {_plural({one.channel for one in channels}, 'channel')} so" if len(channels) > 1 else ""
        steps = 127 / worst.ratio
        left = f"{number(steps)} steps" if steps >= 1 else f"{number(steps)} of a step"
        return self.finding(
            _path(stream, worst.first),
            f"channel {worst.channel} holds {number(worst.size)} in the median token, {number(worst.ratio)} times the "
            f"median channel, up to {_path(stream, worst.last)}: an 8-bit integer grid of such a token has {left} for "
            f"the median channel{others}",
            value=worst.ratio,
            against="max_channel_ratio",
            about="channels",
        )

    def _entries(self, stream: StreamMeasure, entries: list[MassiveActivation]) -> Finding:
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
            f"{number(worst.ratio)} times the median |x| of the stream and {_percent(worst.share)} of the squared norm "
            f"of its token, up to {last}{more}",
            value=worst.ratio,
            against="max_ratio",
            about="entries",
        )


def _percent(share: float) -> str:
    return f"{100 * share:.3g} %"


def _plural(found: set[int], noun: str) -> str:
    return f"{len(found)} {noun}" if len(found) == 1 else f"{len(found)} {noun}s"


def _path(stream: StreamMeasure, index: int) -> str:
    return stream.states[index].path if 0 <= index < len(stream.states) else stream.stream
