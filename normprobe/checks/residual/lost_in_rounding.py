"""NP307."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import final

from normprobe.checks.base import Needs, Outcome, Unit, limit, number
from normprobe.checks.residual.each_stream import EachStreamCheck, Measured
from normprobe.records import Finding, Severity, StreamState
from normprobe.theory import BFLOAT16, FLOAT16, Format, format_of


@final
@dataclass(frozen=True)
class LostInRounding(EachStreamCheck):
    """Rounding the residual sum to half precision loses much of what a branch writes.

    ## What it measures

    The RMS of what rounding the sum of trunk and write to bfloat16 or float16 changes, over the RMS of the write,
    over up to 32 sampled tokens. A sum that runs in half precision is judged by its own format. One in float32 is
    judged by bfloat16, and a note where the rounding would be larger than the write itself.

    ## Why it matters

    bfloat16 has 8 significant bits: a sum is off by up to 1/256 of itself, so that writes of a small share of the
    stream sink into rounding, and whole layers with them. That happens deep in streams that grow, where a residual
    multiplier is small, where the embedding is scaled up, and at the start of a training with small layer scales.

    ## What to do

    Keep the residual stream in float32 (automatic mixed precision does, and some inference engines can), or scale the
    stream down: what counts is the ratio of the two, float16 has three bits more.

    ## When to ignore it

    As a note: when the model is not run in bfloat16. At the start of a training: when the layer scales soon grow.

    ## References

    IEEE 754-2019, sec. 4.3.1 (rounding to nearest); Kalamkar et al. 2019 (bfloat16).
    """

    code, name, severity, since = "NP307", "lost-in-rounding", Severity.WARNING, "0.1.0"
    needs = Needs.STRUCTURE | Needs.FORWARD

    max_loss: float = limit(
        0.5,
        unit=Unit.RATIO,
        source="choice: half of the write; trained models lose at most 0.02 (docs/calibration.md#signal)",
    )
    max_loss_if_cast: float = limit(
        1.0, unit=Unit.RATIO, source="choice: the rounding is as large as the write, nothing of it is left"
    )

    def judge(self, seen: Measured) -> Outcome:
        """Yield at most one finding a stream, at the write that loses most."""
        form = format_of(seen.measure.basis.dtype)
        half = form if form is not None and form in (BFLOAT16, FLOAT16) else None
        losses = [(_loss(state, half), state) for state in seen.states if state.finite and state.write_rms != 0]
        most = self.max_loss if half is not None else self.max_loss_if_cast
        over = [(loss, state) for loss, state in losses if not math.isnan(loss) and self.exceeds(loss, most)]
        if over:
            yield self._found(over, len(losses), half)
        unseen = [state.path for loss, state in losses if math.isnan(loss)]
        if unseen:
            yield self.skip("what it adds is no operand of its own at the add", unseen)

    def _found(self, over: list[tuple[float, StreamState]], count: int, half: Format | None) -> Finding:
        loss, worst = max(over, key=lambda pair: pair[0])
        name, verb = (BFLOAT16.name, "would change") if half is None else (half.name, "changes")
        return self.finding(
            worst.path,
            f"rounding the sum to {name} {verb} it by {number(loss)} times the RMS of this {worst.kind} write, "
            f"which is {number(worst.write_share)} of the stream; so at {len(over)} of {count} writes",
            value=loss,
            against="max_loss" if half is not None else "max_loss_if_cast",
            severity=Severity.NOTE if half is None else self.severity,
            places=[state.path for _, state in over],
        )


def _loss(state: StreamState, half: Format | None) -> float:
    return state.fp16_loss if half is FLOAT16 else state.bf16_loss
