"""NP503."""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

from normprobe.checks.base import Outcome, Unit, limit, number
from normprobe.checks.gradients.by_depth import FAR, NEEDS, SOURCE, Way, WayCheck
from normprobe.records import Severity


@final
@dataclass(frozen=True)
class ExplodingGradient(WayCheck):
    """The gradient grows on its way from the output back to the first block.

    ## What it measures

    The RMS of the gradient that reaches the first add of the longest stream, over that at the last one; in a
    model without a stream the L2 norm of the gradient by the output of the first layer over that of the last.
    A finding where it exceeds the limit.
    Where the output takes features off the stream (a pyramid, a U-Net), the gradient comes in from the side there,
    and the last add that counts is the first of these.

    ## Why it matters

    One step of the optimiser then moves the first blocks by far more than the last ones; a clip by the whole
    norm is set by the first blocks alone and stops the others. The forward is as sensitive: a small change of
    the input becomes a large one of the output.

    ## What to do

    Scale the writers down (NP602), norm the input of the branches, or give the weights of a plain stack the gain
    that their non-linearity asks for. Look for branches that amplify the trunk, and for a first norm whose input
    is tiny, as it multiplies gradients by 1/RMS.

    ## When to ignore it

    When the model trains with normed steps for each parameter (Adam, LARS) and shows no spikes.
    Where it is a note: in a trained model; and where batch norms hold statistics that were never moved, which norm
    nothing in eval mode, in which gradients are taken.

    ## References

    Bengio et al. 1994, sec. 3; Pascanu et al. 2013, sec. 2; Zhang, Dauphin & Ma 2019 (Fixup), sec. 2.
    """

    code, name, severity, since = "NP503", "exploding-gradient", Severity.WARNING, "0.1.0"
    needs = NEEDS

    max_ratio: float = limit(FAR, unit=Unit.RATIO, source=SOURCE)

    def judge(self, way: Way, severity: Severity) -> Outcome:
        """Yield one finding where too much of a gradient reaches the first place."""
        if self.exceeds(way.ratio, self.max_ratio):
            yield self.finding(
                way.path,
                f"the gradient {way.what} is {number(way.ratio)} times larger here than at {way.end}, "
                f"{way.count} places away",
                value=way.ratio,
                against="max_ratio",
                severity=severity,
            )
