"""NP605."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import final

from normprobe.checks.base import Outcome, Unit, limit
from normprobe.checks.initialisation.drawn import NEEDS, DrawnCheck, usual_scheme
from normprobe.records import Finding, Fix, Initialisation, ReportData, Severity, WeightMeasure

_ONE_LAYER = ", as experts that start from one layer"


@final
@dataclass(frozen=True)
class ConstantWeight(DrawnCheck):
    """Outputs of a weight are the same, so that they learn the same.

    ## What it measures

    Weights of products and convolutions that get a gradient: how many of their outputs hold the same numbers as
    another that reads the same inputs. All of them, one constant or one row many times, or a part: a block that was
    filled with one number, or copied. Weights of nothing but zeros are not meant: they start a branch at nothing on
    purpose, and NP606 says where that blocks learning. Nor are readouts, of which a part may be the same since each
    output has a target of its own, and kernels before a pixel shuffle.

    Where gradients were taken, those of equal outputs are compared: a part of the outputs is a warning where they are
    equal too, and a note where they differ, as those of copied outputs that different weights read, or were not taken.
    A note where experts of one branch are copies of each other, which is how a dense model is made into one of experts.

    ## Why it matters

    Equal outputs behind equal weights get equal gradients, if what reads them is as symmetric, and then stay
    equal for all of training: the layer has the capacity of its different outputs alone.

    ## What to do

    Draw the weight at random (`Initialise`); a buffer, `requires_grad=False` or a function for a kernel that is meant
    to be fixed.

    ## When to ignore it

    When what reads the outputs breaks the symmetry on purpose; experts part by the tokens that each is given.

    ## References

    Goodfellow, Bengio & Courville 2016 (Deep Learning), sec. 8.4 (initial parameters have to break symmetry);
    Komatsuzaki et al. 2023 (Sparse Upcycling), abstract (experts that start from one dense layer).
    """

    code, name, severity, since = "NP605", "constant-weight", Severity.WARNING, "0.1.0"
    fixes = (Fix(rewrite="Initialise", at_places=True),)
    needs = NEEDS
    open_too = True
    explains = "NP305", "NP308", "NP501", "NP502", "NP503"

    max_share: float = limit(
        0.02,
        unit=Unit.RATIO,
        source="choice: one output in fifty; numbers that were drawn repeat in no output of four or more",
    )

    def judge(self, init: Initialisation, data: ReportData) -> Outcome:
        """Yield one finding for all weights with equal outputs, those with some, and all experts."""
        outputs = {site.parameter: math.prod(site.shape) // site.fan_in for site in data.anatomy.weights if site.fan_in}
        whole = [weight for weight in init.weights if weight.same_outputs]
        if whole:
            every = f"the constant {whole[0].mean:.4g}" if whole[0].distribution == "constant" else "one row many times"
            text = f"all its outputs are the same ({every}){_gradients(whole[0], data)}"
            yield self._found(whole, text, whole[0].distribution, fixes=_drawn(init, whole))
        part = [w for w in init.weights if w not in whole and "head" not in w.roles and w.parameter in outputs]
        shares = {w.parameter: (w.alike or 0) / outputs[w.parameter] for w in part if w.repeated}
        stay = [w for w in part if self.exceeds(shares.get(w.parameter, 0.0), self.max_share)]
        yield from self._part(stay, shares, outputs, data, fixes=_drawn(init, stay))
        more = {w.parameter: w.repeated / outputs[w.parameter] for w in part if w.repeated and w not in stay}
        others = [w for w in part if self.exceeds(more.get(w.parameter, 0.0), self.max_share)]
        yield from self._part(others, more, outputs, data, Severity.NOTE)
        yield from self._experts(init)

    def _part(
        self,
        found: list[WeightMeasure],
        shares: dict[str, float],
        outputs: dict[str, int],
        data: ReportData,
        severity: Severity | None = None,
        fixes: tuple[Fix, ...] = (),
    ) -> Outcome:
        """One finding for all weights of which some outputs are the same."""
        if found:
            worst = max(found, key=lambda weight: shares[weight.parameter])
            count = worst.repeated if severity else worst.alike
            yield self.finding(
                worst.parameter,
                f"{count} of its {outputs[worst.parameter]} outputs are the same as another{_gradients(worst, data)}",
                value=shares[worst.parameter],
                against="max_share",
                about="part",
                severity=severity,
                places=[weight.parameter for weight in found],
                fixes=fixes,
            )

    def _experts(self, init: Initialisation) -> Outcome:
        """One note for all experts that are copies, in one parameter or in modules of their own."""
        inside = [weight for weight in init.weights if weight.copies]
        apart = [weight for weight in init.weights if weight.copy_of is not None]
        if inside:
            text = f"{inside[0].copies} of the matrices in it are copies of another{_ONE_LAYER}"
            yield self._found(inside, text, inside[0].copies, Severity.NOTE)
        if apart:
            text = f"it is a copy of {apart[0].copy_of}{_ONE_LAYER}; {len(apart)} weights are copies"
            yield self._found(apart, text, len(apart), Severity.NOTE)

    def _found(
        self,
        weights: list[WeightMeasure],
        text: str,
        value: float | str,
        severity: Severity | None = None,
        fixes: tuple[Fix, ...] = (),
    ) -> Finding:
        return self.finding(
            weights[0].parameter,
            text,
            value=value,
            source="Goodfellow, Bengio & Courville 2016, sec. 8.4",
            severity=severity,
            about="experts" if severity else "",
            places=[weight.parameter for weight in weights],
            fixes=fixes,
        )


def _drawn(init: Initialisation, found: list[WeightMeasure]) -> tuple[Fix, ...]:
    """Draws these weights anew, as the others of the model are."""
    scheme = usual_scheme(weight for weight in init.weights if weight not in found)
    return (Fix(rewrite="Initialise", settings={"scheme": scheme}, at_places=True),)


def _gradients(weight: WeightMeasure, data: ReportData) -> str:
    """What is known of the gradients of outputs that are the same."""
    if weight.alike is None:
        return "" if data.level == "backward" else "; gradients (--backward) tell whether they stay so"
    if weight.alike:
        return ", and so are their gradients"
    return "; their gradients differ, so that they part in training"
