"""NP601."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import final

from normprobe.checks.base import Outcome, Unit, limit, number
from normprobe.checks.initialisation.drawn import NEEDS, DrawnCheck
from normprobe.records import Initialisation, ReportData, Severity, WeightMeasure


@final
@dataclass(frozen=True)
class LinearGainBeforeReLU(DrawnCheck):
    """Weights before a ReLU have the gain of a linear layer, and the signal fades from layer to layer.

    ## What it measures

    In a model without norms and residual adds: what the layers before a ReLU leave of the RMS of the signal, the
    product of √E[relu(g z)²] over them for their gains g = std · √fan_in and z from N(0, 1). With Xavier's or
    LeCun's gain of 1 a layer leaves half of the variance, with that of torch's default a sixth. A note where all
    of it is torch's default, which many small models use on purpose or by habit.

    ## Why it matters

    After ten layers a thirtieth of the signal is left, and as little of the gradient. Biases then decide the
    outputs, and training begins with a plateau.

    ## What to do

    `torch.nn.init.kaiming_normal_(weight, nonlinearity="relu")`, whose gain is √2; or norms between the layers.

    ## When to ignore it

    When something that normprobe does not see as a norm restores the scale, or inputs are large on purpose.

    ## References

    He et al. 2015 (Delving Deep into Rectifiers), sec. 2.2, eq. 10; Glorot & Bengio 2010, sec. 4.2.1 (derived for
    functions that are linear around 0).
    """

    code, name, severity, since = "NP601", "linear-gain-before-relu", Severity.WARNING, "0.1.0"
    needs = NEEDS

    min_left: float = limit(
        0.2, unit=Unit.RATIO, source="choice: a fifth of the RMS is left; five layers of gain 1 leave 0.18"
    )

    def judge(self, init: Initialisation, data: ReportData) -> Outcome:
        """Yield one finding for all layers before a ReLU."""
        if data.anatomy.streams or any(norm.executed for norm in data.anatomy.norms):
            return
        before = [w for w in init.weights if w.followed_by == "relu" and w.moment is not None and w.moment < 1]
        fading = [w for w in before if {"xavier", "lecun", "torch_default"} & {*w.recipes}]
        left = math.prod(math.sqrt(w.moment) for w in fading if w.moment is not None)
        if fading and self.exceeds(left, least=self.min_left):
            recipes = _named(fading)
            yield self.finding(
                fading[0].parameter,
                f"{len(fading)} layers before a ReLU, drawn by {recipes}, leave {number(left)} of the signal's RMS",
                value=left,
                against="min_left",
                severity=Severity.NOTE if recipes == "torch_default" else Severity.WARNING,
                places=[w.parameter for w in fading],
            )


def _named(weights: list[WeightMeasure]) -> str:
    """The recipe that most fit; of several for a layer the one that names it most narrowly."""
    order = ("torch_default", "xavier", "lecun")
    names = [next(name for name in order if name in w.recipes) for w in weights]
    return max(dict.fromkeys(names), key=names.count)
