"""NP603."""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

from normprobe.checks.base import Needs, Outcome, Unit, limit, number
from normprobe.checks.initialisation.drawn import NEEDS, DrawnCheck
from normprobe.records import Fix, Initialisation, ReportData, Severity, WeightMeasure

_STD = 0.02  # Radford et al. 2018, sec. 4.1


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

    Draw these weights anew by the class's initialiser (or `Initialise`, where that is GPT-2's), or write into the
    configuration what is meant.

    ## When to ignore it

    When the weights were drawn by another recipe on purpose.

    ## References

    Radford et al. 2019 (GPT-2), sec. 2.3, for the recipe that releases of transformers around 5.14 left out.
    """

    code, name, severity, since = "NP603", "recipe-not-applied", Severity.WARNING, "0.1.0"
    fixes = (Fix(rewrite="Initialise", settings={"scheme": "gpt2"}, at_places=True),)
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
                fixes=None if all(_as_gpt2(weight, data) for _, weight in held) else (),
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


def _as_gpt2(weight: WeightMeasure, data: ReportData) -> bool:
    """Whether the model's own class draws this weight as GPT-2's, so that `Initialise` has its recipe."""
    streams = {site.parameter: site.stream for site in data.anatomy.weights}
    stream = streams.get(weight.parameter)
    writes = len(data.anatomy.streams[stream].branches) if stream is not None and "writer" in weight.roles else 1
    return weight.own is not None and weight.own[1][0] <= _STD / max(writes, 1) ** 0.5 <= weight.own[1][1]
