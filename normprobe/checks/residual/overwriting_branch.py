"""NP306."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import final

from normprobe.checks.base import Needs, Outcome, Unit, limit, number
from normprobe.checks.residual.each_stream import EachStreamCheck, Measured, unless_trained
from normprobe.records import Severity, StreamState


@final
@dataclass(frozen=True)
class OverwritingBranch(EachStreamCheck):
    """A branch writes more than the residual stream holds, and far more than others like it.

    ## What it measures

    Three ratios, of medians over tokens: RMS of the write over that of the trunk it is added to; RMS of the write
    over the median of all branches of its kind in the same stream; and the first of these over its own median. All
    have to exceed their limit. A first write to a small embedding is larger than the trunk in sound models too, and
    is then as large as the others of its kind. In a stream that grows by a factor a block late writes are far larger
    than early ones, and all are alike beside their trunk. Where half of four or more writes are far smaller than the
    others, which of them are off is not told, and nothing is said here.

    ## Why it matters

    After such an add the stream is this branch, and what all branches before it wrote is a small part of it. The norm
    of every later branch divides by the new scale, so that the gradient of what came before shrinks by the same
    factor. It is the trace of a factor that was lost or applied twice: a depth-scaled init on all writers but one, a
    residual multiplier, an output norm that is missing in one block.

    ## What to do

    Compare the writer of this branch with those of the other blocks: its standard deviation, the gain of the norm
    behind it, the constant factor on the branch.

    ## When to ignore it

    In a trained model, where it is a note: layers that write massive activations, or rewrite the stream for the head,
    are known there.

    ## References

    Radford et al. 2019 (GPT-2), sec. 2.3 (writers scaled alike); De & Smith 2020 (branches should be no larger than
    the skip at init).
    """

    code, name, severity, since = "NP306", "overwriting-branch", Severity.WARNING, "0.1.0"
    needs = Needs.STRUCTURE | Needs.FORWARD

    max_ratio: float = limit(
        1.0, unit=Unit.RATIO, source="De & Smith 2020, sec. 2: a branch that is larger than the skip dominates the sum"
    )
    max_over_kind: float = limit(
        10.0,
        unit=Unit.RATIO,
        source="choice: branches of one kind in sound models write within 5 times their median where they are larger "
        "than the trunk (docs/calibration.md#signal)",
    )

    max_over_ratio: float = limit(
        3.0,
        unit=Unit.RATIO,
        source="choice: in streams that grow by a factor a block, branches of one kind write within 3 times their "
        "median beside their trunks (docs/calibration.md#signal)",
    )

    def judge(self, seen: Measured) -> Outcome:
        """Yield one finding for each branch that overwrites the stream."""
        for state, over in self._over(seen):
            yield self.finding(
                state.path,
                f"this {state.kind} branch writes {number(state.write_ratio)} times the RMS of the trunk it is added "
                f"to, and {number(over)} times the median write of its kind",
                value=over,
                against="max_over_kind",
                severity=unless_trained(seen, self.severity),
            )

    def _over(self, seen: Measured) -> Iterator[tuple[StreamState, float]]:
        for states in seen.by_kind().values():
            middle = _middle([state.write_rms for state in states])
            usual = statistics.median_low(state.write_ratio for state in states)
            for state in states:
                over = state.write_rms / middle if middle > 0 else 0.0
                apart = self.exceeds(state.write_ratio, max(self.max_ratio, self.max_over_ratio * usual))
                if apart and self.exceeds(over, self.max_over_kind):
                    yield state, over


def _middle(sizes: Sequence[float]) -> float:
    """What writes of a kind are held against. Where half of four or more are far smaller than the others, it cannot be
    told which are off: the larger ones are no exception then. Of two the smaller one is the measure."""
    return statistics.median_high(sizes) if len(sizes) > 3 else statistics.median_low(sizes)
