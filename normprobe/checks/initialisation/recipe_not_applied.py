"""NP603."""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

from normprobe.checks.base import Needs, Outcome, Unit, limit, number
from normprobe.checks.initialisation.drawn import NEEDS, DrawnCheck
from normprobe.records import Initialisation, ReportData, Severity, WeightMeasure


@final
@dataclass(frozen=True)
class RecipeNotApplied(DrawnCheck):
    """Weights are drawn otherwise than the model's own class draws them from its configuration.

    ## What it measures

    The standard deviation of every weight, against that of the same weight in a fresh instance of the same class
    with the same configuration. A finding for weights whose two 99.9 % intervals lie apart and whose ratio is
    outside the limit, those of one role and direction together, by their median. Classes
    that do not say what they are built with are not built anew.

    ## Why it matters

    What the configuration promises (an initializer range, writers divided by √N as in GPT-2) is not what training
    starts from. Nothing warns: the usual causes are an initialiser that looks for names which a submodule does
    not have, a module that was replaced after the weights were drawn, or memory that was never filled.

    ## What to do

    Draw these weights anew by the class's initialiser, or write into the configuration what is meant.

    ## When to ignore it

    When the weights were drawn by another recipe on purpose.

    ## References

    Radford et al. 2019 (GPT-2), sec. 2.3, for the recipe that releases of transformers around 5.14 left out.
    """

    code, name, severity, since = "NP603", "recipe-not-applied", Severity.WARNING, "0.1.0"
    needs = NEEDS | Needs.CONFIG
    explains = "NP301", "NP501", "NP502", "NP503"

    max_ratio: float = limit(
        1.2, unit=Unit.RATIO, source="choice: a fifth in the standard deviation; smaller changes seldom matter"
    )

    def judge(self, init: Initialisation, data: ReportData) -> Outcome:
        """Yield one finding for each role and direction."""
        if init.own_reason:
            yield self.skip(init.own_reason)
        groups: dict[tuple[str, bool], list[tuple[float, WeightMeasure]]] = {}
        for weight in init.weights:
            ratio = self._ratio(weight)
            if ratio is not None:
                groups.setdefault((weight.roles[0], ratio > 1), []).append((ratio, weight))
        for (role, above), held in groups.items():
            ratio, first = sorted(held, key=lambda pair: pair[0])[len(held) // 2]
            assert first.own is not None
            several = f"{len(held)} {role} weights have" if len(held) > 1 else f"this {role} weight has"
            yield self.finding(
                held[0][1].parameter,
                f"{several} a standard deviation of {number(first.std)} where the model's own class draws "
                f"{number(first.own[0])}: {number(ratio)} times it",
                value=ratio,
                against="max_ratio",
                places=[weight.parameter for _, weight in held],
                about="too large" if above else "too small",
            )

    def _ratio(self, weight: WeightMeasure) -> float | None:
        """std over the own class's, where these differ beyond the limit and chance."""
        if weight.own is None:
            return None
        own, (low, high) = weight.own
        apart = weight.interval[1] < low or weight.interval[0] > high
        if not apart or own == weight.std:
            return None
        ratio = weight.std / own if own else float("inf")
        return ratio if self.exceeds(ratio, self.max_ratio, least=1 / self.max_ratio) else None
