"""NP304."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import final

from normprobe.checks.base import Check, Needs, Outcome, Unit, limit, number
from normprobe.records import Finding, ReportData, Severity, StreamMeasure, StreamState
from normprobe.theory import FLOAT16, format_of


@final
@dataclass(frozen=True)
class HalfHeadroom(Check):
    """The residual stream reaches values that float16 cannot hold with a margin.

    ## What it measures

    The largest |x| of the stream after every write, against 65504, the largest finite float16, and half of
    it. The place is the first add whose sum exceeds the limit: branches may be finite one by one and their
    sum not. That the sum itself overflows is said only where that add is the operation which gave the first
    value that is not finite. A NaN is no size: a write after which the largest |x| is NaN is left to NP504.

    ## Why it matters

    In float16 a sum beyond 65504 is infinite, the next norm turns it into NaN, and the model answers with
    nothing or with one token for ever. An error where the stream is float16 and has overflowed; a warning
    where it has less than a factor of two left, since the inputs of a probe are few, and where a model that
    runs in float32 or bfloat16 would overflow once cast. Many models that were trained in bfloat16 are like
    that and work well there.

    ## What to do

    Do not run the model in float16; use bfloat16 or float32, or keep the residual adds in float32. Where the
    growth itself is the fault, look at the gains of output norms and at the init of the matrices that write
    to the stream.

    ## When to ignore it

    As a warning: when the model is never cast to float16.

    ## References

    IEEE 754-2019, binary16. Micikevicius et al. 2018 (Mixed Precision Training), sec. 3.
    """

    code, name, severity, since = "NP304", "half-headroom", Severity.ERROR, "0.1.0"
    needs = Needs.STRUCTURE | Needs.FORWARD

    max_abs: float = limit(
        FLOAT16.largest / 2,
        unit=Unit.ONE,
        source="IEEE 754-2019, binary16: half of the largest number, 65504; the factor of two is a choice",
    )

    def check(self, data: ReportData) -> Outcome:
        """Yield at most one finding for every stream, at the first write that exceeds the limit."""
        if not data.measurements.residual:
            yield self.skip("no residual stream was measured")
        for stream in data.measurements.residual:
            if not stream.states:
                yield self.skip("no write to the stream was measured", [stream.stream])
            sized = [state for state in stream.states if not math.isnan(state.abs_max)]
            over = [state for state in sized if self.exceeds(state.abs_max, self.max_abs)]
            if over:
                yield self._found(data, stream, over)
            elif len(sized) < len(stream.states):
                lost = (state.path for state in stream.states if math.isnan(state.abs_max))
                yield self.skip("the largest |x| is NaN (NP504)", lost)

    def _found(self, data: ReportData, stream: StreamMeasure, over: list[StreamState]) -> Finding:
        lost = [state for state in over if self.exceeds(state.abs_max, FLOAT16.largest)]
        first = (lost or over)[0]
        is_half = format_of(stream.basis.dtype) is FLOAT16
        return self.finding(
            first.path,
            _message(first, is_half, stream.basis.dtype, bool(lost), _made(data, stream, first)),
            value=first.abs_max,
            against="max_abs",
            severity=Severity.ERROR if is_half and lost else Severity.WARNING,
            places=[state.path for state in over],
        )


def _made(data: ReportData, stream: StreamMeasure, state: StreamState) -> bool:
    """Whether the add of this state gave the first value that is not finite: it was given finite ones."""
    operation = data.measurements.first_non_finite_operation
    branches = next((each.branches for each in data.anatomy.streams if each.name == stream.stream), ())
    return operation is not None and state.branch < len(branches) and operation.site == branches[state.branch].add


def _message(state: StreamState, is_half: bool, dtype: str, lost: bool, made: bool) -> str:
    size = f"|x| reaches {number(state.abs_max)} in channel {state.abs_argmax_channel}"
    after = f"{size} after this write, in {dtype}"
    if is_half or math.isinf(state.abs_max):
        overflow = "the sum overflows" if made else "it has overflowed"
        return f"{after}: {overflow if lost else 'less than a factor of two is left'}"
    room = "it would overflow" if lost else "less than a factor of two would be left"
    return f"{after}: do not run it in float16, where {room}"
