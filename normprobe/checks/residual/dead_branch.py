"""NP305."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

from normprobe.checks.base import Needs, Outcome, Unit, limit, number
from normprobe.checks.residual.each_stream import EachStreamCheck, Measured
from normprobe.records import Finding, Severity, StreamState


@final
@dataclass(frozen=True)
class DeadBranch(EachStreamCheck):
    """A branch adds nothing to the residual stream, at no token.

    ## What it measures

    The RMS of what every branch adds, at the token where it is largest, as a share of the median of the same over the
    branches of its kind (attention, MLP, …) in the same stream that add something. All tokens count, so that a branch
    that some tokens skip is alive. A write that is no operand of its own at its add is not seen, and skipped.

    ## Why it matters

    The layer computes and changes nothing. Where its last weights are zero, the weights before them get no gradient
    either, until these have moved. In a trained model it is a weight that was lost in a conversion, a gate that
    closed, a norm whose gain went to zero, or a layer that was pruned and is still paid for.

    ## What to do

    Look at the writer's weights, at the gain of an output norm and at the branch's learned scale. If the branch is
    dead on purpose, remove it.

    ## When to ignore it

    When the branch is meant to start at zero: a block that was added to a trained model. Where all branches of a kind
    add nothing in a model that is not trained, that is taken for such a start (ReZero, zeroed last gains, zeroed
    writers) and no finding. Branches that stand beside another one of their kind in their block, and of which none with
    the same operations and shapes adds anything, are skipped where weights of zeros write them: so do adapters start,
    and layers of a control network.

    ## References

    Bachlechner et al. 2021 (ReZero), sec. 3; Goyal et al. 2017, sec. 5.1 (last gains of a block start at zero); He et
    al. 2016 (a block that adds nothing is the identity).
    """

    code, name, severity, since = "NP305", "dead-branch", Severity.WARNING, "0.1.0"
    needs = Needs.STRUCTURE | Needs.FORWARD

    least_share: float = limit(
        1e-4,
        unit=Unit.RATIO,
        source="choice: a two-hundredth of the smallest write of a sound branch beside the median of its kind, 0.02 "
        "(docs/calibration.md#signal)",
    )

    def judge(self, seen: Measured) -> Outcome:
        """Yield one finding for each kind of branch of which some add nothing."""
        for kind, states in seen.by_kind().items():
            alive = [state.write_max for state in states if state.write_max > 0]
            middle = statistics.median(alive) if alive else 0.0
            dead = [s for s in states if not alive or s.write_max < self.least_share * middle]
            started = _started(seen, states, dead) if alive else []
            lost = [state for state in dead if state not in started]
            if lost and (alive or seen.trained):
                yield self._found(kind, lost, len(states), middle)
            if started:
                why = "weights of zeros write it and all like it, beside another branch: additions to a layer start so"
                yield self.skip(why, [state.path for state in started])
        unseen = [state.path for state in self.unseen(seen)]
        if unseen:
            yield self.skip("what it adds is no operand of its own at the add", unseen)

    def _found(self, kind: str, dead: Sequence[StreamState], count: int, middle: float) -> Finding:
        largest = max(state.write_max for state in dead)
        share = largest / middle if middle else 0.0
        size = "nothing" if largest == 0 else f"next to nothing: its largest token RMS is {number(largest)}"
        beside = f", {number(middle)} in the median of those that add something" if middle else ""
        many = f"; {len(dead)} of {count} such branches" if len(dead) > 1 else f"; 1 of {count} such branches"
        return self.finding(
            dead[0].path,
            f"this {kind} branch adds {size}{beside}{many}",
            value=share,
            against="least_share",
            places=[state.path for state in dead],
        )


def _started(seen: Measured, states: Sequence[StreamState], dead: Sequence[StreamState]) -> list[StreamState]:
    """Of the dead branches those that start at zero: weights of zeros write each of its form, and beside each stands
    another branch of its kind in the same block that adds something."""
    branches = () if seen.stream is None else seen.stream.branches
    told = [(state, branches[state.branch]) for state in states if state.branch < len(branches)]
    alive = [(state, branch) for state, branch in told if state not in dead]
    living, beside = {seen.added.form(branch) for _, branch in alive}, {state.block for state, _ in alive}
    return [
        state
        for state, branch in told
        if state in dead and state.write_max == 0 and seen.added.from_zero(branch)
        if seen.added.form(branch) not in living and state.block in beside
    ]
