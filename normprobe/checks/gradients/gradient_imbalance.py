"""NP501."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import final

from normprobe.checks.base import Check, Outcome, Unit, limit, number
from normprobe.checks.gradients.by_depth import NEEDS, severity, tapped
from normprobe.records import Finding, GradientMeasure, ReportData, Severity, Skipped


@final
@dataclass(frozen=True)
class GradientImbalance(Check):
    """Gradients of the parameters differ much between the first and the last blocks.

    ## What it measures

    A least-squares line through the logarithm of each branch's parameter gradient (L2 norm), by depth, with one
    slope and a level for each kind of branch: the ratio of its ends, e to the slope times the writes that the
    kinds span. It is a finding where that exceeds
    the limit in either direction and the 95 % interval of the slope does not hold 0. The closed form for the
    placement stands beside it: a constant for Pre-LN, a slope of ½ ln(1 + r²) a branch for Post-LN with branches
    of RMS r. Where the gradient itself vanishes or explodes on its way, and NP502 or NP503 are heard, they say so
    instead. Where the output takes features off the stream on its way (a pyramid, a U-Net), branches up to the first
    such place are compared.

    ## Why it matters

    One learning rate has to serve all blocks. With Post-LN the gradients near the output are large at the start,
    which is why it needs warm-up; where they are large near the input, the stream has grown so much that later
    blocks hardly matter.

    ## What to do

    Pre-norm, DeepNorm or Admin for Post-LN; writers scaled by 1/√N (NP602); Adam with warm-up evens out a part.

    ## When to ignore it

    In a trained model, where it is a note: an optimum has small gradients everywhere, and their ratio says
    little. Where batch norms hold statistics that were never moved, a note too: these norm nothing in eval mode, in
    which gradients are taken.

    ## References

    Xiong et al. 2020 (On Layer Normalization in the Transformer Architecture), theorem 1 and sec. 3; Liu et al.
    2020 (Admin), sec. 3; Wang et al. 2022 (DeepNet), sec. 3.
    """

    code, name, severity, since = "NP501", "gradient-imbalance", Severity.WARNING, "0.1.0"
    needs = NEEDS
    gives_way = "NP502", "NP503"

    max_ratio: float = limit(
        30.0,
        unit=Unit.RATIO,
        source="choice: half as much again as the largest of sound models, 20 (docs/calibration.md#gradients)",
    )

    def check(self, data: ReportData) -> Outcome:
        """Yield one finding where the line through the gradients is too steep."""
        gradients = data.measurements.gradients
        if gradients is None:
            yield self.skip("no gradients were measured")
        elif gradients.interval is None:
            yield self._unfit(gradients)
        elif not gradients.interval[0] <= 0 <= gradients.interval[1]:
            span = max((kind.span for kind in gradients.kinds), default=0)
            ratio = math.exp(abs(gradients.slope) * span)
            if self.exceeds(ratio, self.max_ratio):
                yield self._found(gradients, gradients.interval, span, ratio, severity(data))

    def _unfit(self, gradients: GradientMeasure) -> Skipped:
        """Why there is no line with an interval."""
        held = [b for b in gradients.compared() if b.parameters]
        if not held:
            return self.skip("no branch of a residual stream has parameters: layers in a row are not compared")
        if lost := [b.path for b in held if not math.isfinite(b.parameter_norm)]:
            return self.skip("a gradient is not finite (NP504)", lost)
        if idle := [b.path for b in held if b.parameter_norm == 0]:
            return self.skip("the gradient of a branch is 0, and has no logarithm", idle)
        few = "there are too few branches of one kind for an interval of the slope"
        short = tapped(gradients)
        return self.skip(f"{few}: {short}" if short else few)

    def _found(
        self,
        gradients: GradientMeasure,
        interval: tuple[float, float],
        span: int,
        ratio: float,
        severity: Severity,
    ) -> Finding:
        rising = gradients.slope > 0
        norms = [b for b in gradients.compared() if b.parameters]
        sure = f"slope {number(gradients.slope)}, 95 % between {number(interval[0])} and {number(interval[1])}"
        law = gradients.expected
        form = "" if law is None else f"; the closed form for this placement has the slope {number(law.slope)}"
        return self.finding(
            norms[-1 if rising else 0].path,
            f"gradients of the {'last' if rising else 'first'} branches are {number(ratio)} times larger, by a line "
            f"over {span} writes ({sure}){form}",
            value=ratio,
            against="max_ratio",
            severity=severity,
        )
