"""NP606."""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

from normprobe.checks.base import Outcome
from normprobe.checks.initialisation.drawn import NEEDS, DrawnCheck
from normprobe.records import Initialisation, ReportData, Severity


@final
@dataclass(frozen=True)
class BlockedGradient(DrawnCheck):
    """Two factors in a row of a branch are 0, and each keeps the gradient from the other.

    ## What it measures

    Branches in which at least two of these are nothing but zeros, biases included: the weights that read the
    stream, those that write to it, the gain of the norm on the branch, and the factor on the branch. And, where
    gradients were taken, branches none of whose parameters has a gradient though one reaches their add.

    ## Why it matters

    One zero factor is a sound start (ReZero, Fixup, a zero-initialised gain): it gets a gradient from what is
    before it, moves, and the rest follows. The derivative by either of two zero factors has the other one in it:
    both stay 0 for ever, and the branch is dead weight. Nothing else looks wrong, and the loss falls as far as
    the other branches take it.

    ## What to do

    Leave one of them at 0 and draw the other.

    ## When to ignore it

    Never for a branch that is to learn.

    ## References

    Bachlechner et al. 2021 (ReZero), sec. 3; Zhang, Dauphin & Ma 2019 (Fixup), sec. 3 (the last layer of a
    branch alone is 0).
    """

    code, name, severity, since = "NP606", "blocked-gradient", Severity.ERROR, "0.1.0"
    needs = NEEDS
    open_too = True

    def judge(self, init: Initialisation, data: ReportData) -> Outcome:
        """Yield one finding for all branches that are blocked by the same factors, and one for those without a
        gradient."""
        places = [(blocked.path, blocked.zeros) for blocked in init.blocked]
        if places:
            yield self.finding(
                places[0][0],
                f"no weight of this branch gets a gradient: {' and '.join(places[0][1])} are both 0",
                value=0.0,
                source="the product rule: each derivative has the other factor in it",
                places=[path for path, _ in places],
                about="factors",
            )
        known = {(blocked.stream, blocked.branch) for blocked in init.blocked}
        gradients = data.measurements.gradients
        idle = [
            branch.path
            for branch in (() if gradients is None else gradients.branches)
            if branch.parameters and branch.parameter_norm == 0 and branch.activation_rms > 0
            if (branch.stream, branch.branch) not in known
        ]
        if idle:
            yield self.finding(
                idle[0],
                "none of its parameters gets a gradient, though one reaches its add",
                value=0.0,
                source="the measured gradients",
                severity=Severity.WARNING,
                places=idle,
                about="measured gradient",
            )
