"""NP203."""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

from normprobe.checks.base import Check, Outcome
from normprobe.checks.placement.trunk_norms import on_the_trunk
from normprobe.records import Finding, ReportData, Severity, Stream


@final
@dataclass(frozen=True)
class MisplacedFinalNorm(Check):
    """A norm stands on the trunk before the last writes, and the end of the stream is read raw.

    ## What it measures

    A stream whose norms sit inside its branches, whose end reaches the head without a norm, and that is normed
    as a whole at an earlier place: the final norm of such a stream belongs behind its last write.

    ## Why it matters

    The head reads the raw sum of what was normed and the writes behind it, at a scale that differs from token
    to token, and blocks behind the norm see another trunk than those before it. Loops that slice the list of
    blocks, early exits and pipeline stages put the norm at the wrong end of the last block or of a stage.

    ## What to do

    Move the norm behind the last write of the stream. In a converted model, compare the order of calls with
    that of the source.

    ## When to ignore it

    When the model was trained with the norm where it is and its head has learned that scale.

    ## References

    Radford et al. 2019 (GPT-2), sec. 2.3: the additional norm stands after the final block.
    """

    code, name, severity, since = "NP203", "misplaced-final-norm", Severity.ERROR, "0.1.0"

    def check(self, data: ReportData) -> Outcome:
        """Yield one finding for every stream with a norm before its last writes in place of one behind them."""
        if not data.anatomy.streams:
            yield self.skip("no residual stream was found")
        for stream in data.anatomy.streams:
            place = misplaced(stream)
            if place is not None:
                yield self._found(stream, place)
            elif stream.final_norm is None and stream.needs_final_norm is None and on_the_trunk(stream):
                reason = stream.final_norm_reason or "it could not be decided whether the end needs a norm"
                yield self.skip(f"its trunk is normed before the last writes (NP204); {reason}", [stream.name])

    def _found(self, stream: Stream, place: int) -> Finding:
        left = len(stream.branches) - 1 - place
        end = stream.raw_end
        if end is None:
            reader = "the head reads the raw stream"
        else:
            reader = f"the stream is returned raw as {end.reader}" if end.returned else f"{end.reader} reads it raw"
        return self.finding(
            stream.branches[place].post_norm or stream.name,
            f"norms the stream {stream.name} before its last {left} write{'' if left == 1 else 's'} instead of "
            f"behind them; {reader}",
            value=float(left),
            source="Radford et al. 2019, sec. 2.3",
            severity=Severity.NOTE if end is not None and end.returned else None,
        )


def misplaced(stream: Stream) -> int | None:
    """The last write whose sum is normed, in a stream that needs a final norm and has none; None where there is none
    or the stream is sound."""
    if stream.final_norm is not None or not stream.needs_final_norm:
        return None
    return max(on_the_trunk(stream), default=None)
