"""NP605."""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

from normprobe.checks.base import Outcome
from normprobe.checks.initialisation.drawn import NEEDS, DrawnCheck
from normprobe.records import Initialisation, ReportData, Severity


@final
@dataclass(frozen=True)
class ConstantWeight(DrawnCheck):
    """All outputs of a weight are the same, so that they learn the same.

    ## What it measures

    Weights of products and convolutions, with two outputs or more, that hold the same numbers for each of them:
    one constant everywhere, or one row many times. Weights of nothing but zeros are not meant: they start a
    branch at nothing on purpose, and NP606 says where that blocks learning.

    ## Why it matters

    Equal outputs behind equal weights get equal gradients, if what reads them is as symmetric, and then stay
    equal for all of training: the layer has the capacity of one unit.

    ## What to do

    Draw the weight at random; a buffer or a function for a kernel that is meant to be fixed.

    ## When to ignore it

    When the weight is fixed (averages, a filter), or what reads it breaks the symmetry on purpose.

    ## References

    Goodfellow, Bengio & Courville 2016 (Deep Learning), sec. 8.4 (initial parameters have to break symmetry).
    """

    code, name, severity, since = "NP605", "constant-weight", Severity.WARNING, "0.1.0"
    needs = NEEDS
    open_too = True

    def judge(self, init: Initialisation, data: ReportData) -> Outcome:
        """Yield one finding for all such weights."""
        found = [weight for weight in init.weights if weight.same_outputs]
        if found:
            first = found[0]
            every = f"the constant {first.mean:.4g}" if first.distribution == "constant" else "one row many times"
            yield self.finding(
                first.parameter,
                f"all its outputs are the same ({every}), and so are their gradients",
                value=first.distribution,
                source="Goodfellow, Bengio & Courville 2016, sec. 8.4",
                places=[weight.parameter for weight in found],
            )
