"""What the checks of initialisation share: they judge weights that look as they were drawn."""

from __future__ import annotations

from abc import abstractmethod
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from normprobe.checks.base import Check, Needs, Outcome
from normprobe.records import Initialisation, ReportData, WeightMeasure

NEARLY = 0.95  # of several weights: of one in a thousand the interval misses by chance
_SCHEMES = {
    "fixed_0.02": "gpt2",
    "gpt2_depth": "gpt2",
    "xavier": "xavier",
    "kaiming": "kaiming",
    "lecun": "lecun",
    "deepnorm": "deepnorm",
    "orthogonal": "orthogonal",
}
NEEDS = Needs.STRUCTURE | Needs.WEIGHTS | Needs.FORWARD


@dataclass(frozen=True)
class DrawnCheck(Check):
    """Base of a check of initialisation; silent where the weights look trained, or where it is open whether they are
    and `open_too` is not set."""

    open_too = False

    def check(self, data: ReportData) -> Outcome:
        """Yield what `judge` finds in weights that were drawn."""
        init = data.measurements.init
        if init is None:
            yield self.skip("how the weights were drawn was not measured")
        elif init.trained is False or (self.open_too and init.trained is None):
            yield from self.judge(init, data)

    @abstractmethod
    def judge(self, init: Initialisation, data: ReportData) -> Outcome:
        """Yield what is wrong with weights that look as they were drawn."""


def common(weights: Sequence[WeightMeasure]) -> set[str]:
    """The recipes that nearly all of these weights fit."""
    counts = Counter(name for weight in weights for name in weight.recipes)
    return {name for name, count in counts.items() if count >= NEARLY * len(weights)}


def usual_scheme(weights: Iterable[WeightMeasure]) -> str:
    """The scheme of `Initialise` that most of these weights fit, Xavier's where they fit none."""
    fitting = (dict.fromkeys(_SCHEMES[name] for name in weight.recipes if name in _SCHEMES) for weight in weights)
    found = Counter(scheme for schemes in fitting for scheme in schemes)
    return found.most_common(1)[0][0] if found else "xavier"
