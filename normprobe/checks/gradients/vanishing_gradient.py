"""NP502."""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

from normprobe.checks.base import Outcome, Unit, limit, number
from normprobe.checks.gradients.by_depth import FAR, NEEDS, SOURCE, Way, WayCheck
from normprobe.records import Severity


@final
@dataclass(frozen=True)
class VanishingGradient(WayCheck):
    """The gradient is lost on its way from the output back to the first block.

    ## What it measures

    The RMS of the gradient that reaches the first add of the longest stream, over that at the last one; in a
    model without a stream the L2 norm of the gradient by the output of the first layer over that of the last.
    A finding where it falls below the limit.
    Where the output takes features off the stream (a pyramid, a U-Net), the gradient comes in from the side there,
    and the last add that counts is the first of these.

    ## Why it matters

    The first blocks then learn nothing while the last ones do. In half precision their gradients round to 0
    before the optimiser sees them.

    ## What to do

    Residual connections whose skip is not scaled down and not normed (Pre-LN); an initialisation that keeps the
    variance behind the non-linearity (NP601); for deep Post-LN, DeepNorm. Look for a saturated function, a skip
    that is multiplied by less than 1, or a norm behind a large sum.

    ## When to ignore it

    Where the first blocks are frozen, or the loss was made up and the true one reads the early blocks.
    Where it is a note: in a trained model; and where batch norms hold statistics that were never moved, which norm
    nothing in eval mode, in which gradients are taken.

    ## References

    Hochreiter 1991; Bengio et al. 1994, sec. 3; Glorot & Bengio 2010, sec. 4; Xiong et al. 2020, sec. 3.
    """

    code, name, severity, since = "NP502", "vanishing-gradient", Severity.WARNING, "0.1.0"
    needs = NEEDS

    min_ratio: float = limit(1 / FAR, unit=Unit.RATIO, source=SOURCE)

    def judge(self, way: Way, severity: Severity) -> Outcome:
        """Yield one finding where too little of the gradient reaches the first place."""
        if self.exceeds(way.ratio, least=self.min_ratio):
            yield self.finding(
                way.path,
                f"of the gradient {way.what} a share of {number(way.ratio)} is left here, against that at {way.end}, "
                f"{way.count} places away",
                value=way.ratio,
                against="min_ratio",
                severity=severity,
            )
