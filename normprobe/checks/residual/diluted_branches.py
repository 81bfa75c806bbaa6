"""NP302."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import final

from normprobe.checks.base import Needs, Outcome, Unit, limit, number
from normprobe.checks.residual.each_stream import EachStreamCheck, Measured
from normprobe.records import Finding, Severity, StreamState

_FEWEST = 4  # branches that make a finding; one or two small ones have reasons of their own


@final
@dataclass(frozen=True)
class DilutedBranches(EachStreamCheck):
    """Many branches write so little beside the residual stream that their layers idle.

    ## What it measures

    The RMS of every write over the RMS of the stream after it, a median over tokens. Found where at least four
    writes, and at least a quarter of all, lie below the limit. The limit for a model that is not known to be trained
    is lower, since small widths and depth-scaled inits start small on purpose; branches with a learned scale or gate
    do not count there, and writes of exactly 0 are left to NP305.

    ## Why it matters

    In a pre-norm stream every branch reads a stream of scale one and adds to one that grows. If it grows far, the
    deep layers hardly change it: they are paid for and can be removed at little loss. In a new model the head sees
    the embedding alone, and most of what the branches write is lost in half precision (NP307).

    ## What to do

    Look at what makes the stream large: an embedding that is scaled up, one branch that overwrites it (NP306), growth
    (NP301). `measures=["depth"]` tells what each branch is worth. For training: scale the norms' outputs by depth,
    use sandwich norms, or start with the embedding at the scale of the writes.

    ## When to ignore it

    When a model was made deeper on purpose by blocks that start small.

    ## References

    Sun et al. 2025 (The Curse of Depth in Large Language Models), sec. 3; Gromov et al. 2024 (The Unreasonable
    Ineffectiveness of the Deeper Layers), abstract; Liu et al. 2020 (Admin), sec. 4 (dependence on residual branches).
    """

    code, name, severity, since = "NP302", "diluted-branches", Severity.WARNING, "0.1.0"
    needs = Needs.STRUCTURE | Needs.FORWARD

    least_share: float = limit(
        0.02,
        unit=Unit.RATIO,
        source="choice: a fifth of the smallest write of trained models, 0.1 (docs/calibration.md#signal)",
    )
    least_share_at_init: float = limit(
        5e-4,
        unit=Unit.RATIO,
        source="choice: an eighth of bfloat16's spacing; of new models of width 32 and more fewer than a quarter of "
        "the writes lie below (docs/calibration.md#signal)",
    )
    least_part: float = limit(0.25, unit=Unit.RATIO, source="choice: a quarter of the branches")

    def judge(self, seen: Measured) -> Outcome:
        """Yield one finding for a stream of which many branches idle."""
        name = "least_share" if seen.trained else "least_share_at_init"
        told = [state for state in seen.states if math.isfinite(state.write_share) and state.write_rms > 0]
        if not seen.trained:
            told = [state for state in told if not seen.learned(state)]
        idle = [state for state in told if self.exceeds(state.write_share, least=getattr(self, name))]
        if len(idle) >= _FEWEST and self.exceeds(len(idle) / len(seen.states), math.nextafter(self.least_part, 0)):
            yield self._found(seen, idle, name)

    def _found(self, seen: Measured, idle: list[StreamState], name: str) -> Finding:
        least = min(idle, key=lambda state: state.write_share)
        return self.finding(
            least.path,
            f"{len(idle)} of {len(seen.states)} writes are less than {number(getattr(self, name))} of the stream that "
            f"they are added to; this one, of kind {least.kind}, is {number(least.write_share)} of it",
            value=least.write_share,
            against=name,
            places=[state.path for state in idle],
        )
