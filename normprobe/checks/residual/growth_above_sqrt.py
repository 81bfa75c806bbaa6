"""NP301."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import final

from normprobe.checks.base import Needs, Outcome, Unit, limit, number
from normprobe.checks.residual.each_stream import EachStreamCheck, Measured, unless_trained
from normprobe.records import Finding, Severity

_FEWEST = 4  # blocks in the second half, without which a few large writes look like a law


@final
@dataclass(frozen=True)
class GrowthAboveSqrt(EachStreamCheck):
    """The residual stream grows faster with depth than independent writes would make it.

    ## What it measures

    Two ways out of the √L law, on streams that are plain sums of their writes. Aligned: the RMS at the end over
    √(entry² + Σ write²), which is what writes of the measured sizes give if they are independent of each other.
    Geometric: the growth of the RMS over the second half of the writes, over √2, which is what writes of one size
    give; counted only where at least half of the blocks there take part, so that one large write is none, and from
    eight blocks on.

    ## Why it matters

    Writes that point the same way grow like L, branches that read the stream without a norm multiply it by a constant
    in every block. Then the first layers drown, float16 overflows (NP304), bfloat16 rounds writes away (NP307), and
    the gradient differs between first and last blocks by the same factor.

    ## What to do

    Scale the matrices that write by 1/√(writes), put a norm before each branch, or give the branches a small learned
    or constant scale. Aligned writes in a new model: look for biases that all blocks add.

    ## When to ignore it

    In a trained model, where it is a note: growth by a constant factor a block is common there, and the final norm
    takes it away.

    ## References

    Xiong et al. 2020, lemma 2 (variance grows linearly in Pre-LN); Zhang et al. 2019 (Fixup), sec. 2 (exponential
    growth without norms); De & Smith 2020, sec. 3; Radford et al. 2019 (GPT-2), sec. 2.3.
    """

    code, name, severity, since = "NP301", "growth-above-sqrt", Severity.WARNING, "0.1.0"
    needs = Needs.STRUCTURE | Needs.FORWARD

    max_excess: float = limit(
        2.0,
        unit=Unit.RATIO,
        source="choice: twice what independent writes give (Xiong et al. 2020, lemma 2); sound models reach 1.7 "
        "(docs/calibration.md#signal)",
    )

    max_growth: float = limit(
        2.0,
        unit=Unit.RATIO,
        source="choice: twice what writes of one size give over as many blocks; new models of twelve reach 1.2 "
        "(docs/calibration.md#signal)",
    )

    def judge(self, seen: Measured) -> Outcome:
        """Yield at most one finding for each stream that is a plain sum."""
        states = seen.states
        if not seen.plain or not all(state.finite for state in states):
            return
        measure = seen.measure
        independent = measure.independent_rms
        if math.isnan(independent):
            yield self.skip("a write was not measured", [measure.stream])
        elif independent > 0 and self.exceeds(states[-1].rms_median / independent, self.max_excess):
            yield self._aligned(seen)
        elif (excess := _geometric(_block_ends(seen))) is not None and self.exceeds(excess, self.max_growth):
            yield self._geometric(seen, excess)

    def _aligned(self, seen: Measured) -> Finding:
        end, independent = seen.states[-1].rms_median, seen.measure.independent_rms
        return self.finding(
            seen.measure.stream,
            f"after {len(seen.states)} writes the RMS is {number(end)}, {number(end / independent)} times what writes "
            f"of these sizes give if they are independent ({number(independent)}): they point the same way",
            value=end / independent,
            against="max_excess",
            severity=unless_trained(seen, self.severity),
        )

    def _geometric(self, seen: Measured, excess: float) -> Finding:
        ends = _block_ends(seen)
        half, end = ends[len(ends) // 2 - 1], ends[-1]
        factor = (end / half) ** (1 / (len(ends) - len(ends) // 2))
        return self.finding(
            seen.measure.stream,
            f"the RMS grows from {number(half)} to {number(end)} over the second half of {len(ends)} blocks, by "
            f"{number(factor)} a block, {number(excess)} times what writes of one size give",
            value=excess,
            against="max_growth",
            severity=unless_trained(seen, self.severity),
        )


def _block_ends(seen: Measured) -> list[float]:
    """The median RMS after the last write of each block."""
    return list({seen.block(state): state.rms_median for state in seen.states}.values())


def _geometric(ends: Sequence[float]) -> float | None:
    """The growth over the second half over that of writes of one size; None where fewer than half of the blocks make
    it, or where there are too few."""
    start = len(ends) // 2 - 1
    late = ends[max(start, 0) :]
    if len(ends) < 2 * _FEWEST or not all(end > 0 for end in late):
        return None
    steps = [math.log(after / before) for before, after in pairwise(late)]
    total, squares = math.fsum(steps), math.fsum(step**2 for step in steps)
    if total <= 0 or total**2 / squares < len(steps) / 2:
        return None
    return math.exp(total) / math.sqrt(len(ends) / (start + 1))
