"""NP605."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import final

from normprobe.checks.base import Outcome, Unit, limit
from normprobe.checks.initialisation.drawn import NEEDS, DrawnCheck
from normprobe.records import Finding, Initialisation, ReportData, Severity, WeightMeasure


@final
@dataclass(frozen=True)
class ConstantWeight(DrawnCheck):
    """Outputs of a weight are the same, so that they learn the same.

    ## What it measures

    Weights of products and convolutions that get a gradient: how many of their outputs hold the same numbers as
    another that reads the same inputs. All of them, one constant or one row many times, or a part: a block that was
    filled with one number, or copied. Weights of nothing but zeros are not meant: they start a branch at nothing on
    purpose, and NP606 says where that blocks learning. Nor are readouts, of which a part may be the same since each
    output has a target of its own, and kernels before a pixel shuffle. A note where experts in one parameter are
    copies of each other, which is how a dense model is made into one of experts.

    ## Why it matters

    Equal outputs behind equal weights get equal gradients, if what reads them is as symmetric, and then stay
    equal for all of training: the layer has the capacity of its different outputs alone.

    ## What to do

    Draw the weight at random; a buffer, `requires_grad=False` or a function for a kernel that is meant to be fixed.

    ## When to ignore it

    When what reads the outputs breaks the symmetry on purpose; experts part by the tokens that each is given.

    ## References

    Goodfellow, Bengio & Courville 2016 (Deep Learning), sec. 8.4 (initial parameters have to break symmetry);
    Komatsuzaki et al. 2023 (Sparse Upcycling), abstract (experts that start from one dense layer).
    """

    code, name, severity, since = "NP605", "constant-weight", Severity.WARNING, "0.1.0"
    needs = NEEDS
    open_too = True

    max_share: float = limit(
        0.02,
        unit=Unit.RATIO,
        source="choice: one output in fifty; numbers that were drawn repeat in no output of four or more",
    )

    def judge(self, init: Initialisation, data: ReportData) -> Outcome:
        """Yield one finding for all weights with equal outputs, one for all with some, and one for all experts."""
        whole = [weight for weight in init.weights if weight.same_outputs]
        if whole:
            every = f"the constant {whole[0].mean:.4g}" if whole[0].distribution == "constant" else "one row many times"
            text = f"all its outputs are the same ({every}), and so are their gradients"
            yield self._found(whole, text, whole[0].distribution)
        yield from self._part([w for w in init.weights if w not in whole and "head" not in w.roles], data)
        copied = [weight for weight in init.weights if weight.copies]
        if copied:
            text = (
                f"{copied[0].copies} of the matrices in it are copies of another, as experts that start from one layer"
            )
            yield self._found(copied, text, copied[0].copies, Severity.NOTE)

    def _part(self, weights: list[WeightMeasure], data: ReportData) -> Outcome:
        """One finding for all weights of which some outputs are the same."""
        held = {weight.parameter for weight in weights if weight.repeated}
        sites = [site for site in data.anatomy.weights if site.parameter in held and site.fan_in]
        outputs = {site.parameter: math.prod(site.shape) // site.fan_in for site in sites}
        shares = {w.parameter: w.repeated / outputs[w.parameter] for w in weights if w.parameter in outputs}
        found = [w for w in weights if self.exceeds(shares.get(w.parameter, 0.0), self.max_share)]
        if found:
            worst = max(found, key=lambda weight: shares[weight.parameter])
            yield self.finding(
                worst.parameter,
                f"{worst.repeated} of its {outputs[worst.parameter]} outputs are the same as another, and so are their "
                "gradients",
                value=shares[worst.parameter],
                against="max_share",
                about="part",
                places=[weight.parameter for weight in found],
            )

    def _found(
        self, weights: list[WeightMeasure], text: str, value: float | str, severity: Severity | None = None
    ) -> Finding:
        return self.finding(
            weights[0].parameter,
            text,
            value=value,
            source="Goodfellow, Bengio & Courville 2016, sec. 8.4",
            severity=severity,
            about="experts" if severity else "",
            places=[weight.parameter for weight in weights],
        )
