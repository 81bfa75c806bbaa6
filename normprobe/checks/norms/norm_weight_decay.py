"""NP114."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

from normprobe.checks.base import Check, Needs, Outcome, Unit, limit, number
from normprobe.records import Finding, ReportData, Severity
from normprobe.records.optimizer import NormStep, OptimizerGroup, OptimizerMeasure

NONE_HELD = "the optimiser holds no parameter of this model: it was made for another one, or holds copies"


@final
@dataclass(frozen=True)
class NormWeightDecay(Check):
    """The optimiser decays the gains of norms.

    ## What it measures

    Which group of the given optimiser holds the gain and offset of every norm that runs, and what one step of
    a copy of the optimiser takes off an element whose gradient is 0. Norms are found by behaviour, so that a
    list of names or classes that misses some is found out. Gains that decay are a warning; where only offsets
    do, a note. A gain applied as 1 + w is passed, since decay pulls it to 1.

    ## Why it matters

    What follows a gain can undo it, so that decay does not make the function simpler: it pulls the scale of
    every branch to 0 against the loss, in fine-tuning away from where the checkpoint had it. Most recipes
    leave norms out; lists that look for "LayerNorm.weight" miss every modern name.

    ## What to do

    Put the gains and offsets of the norms that are named in a group of their own, `{"params": [...],
    "weight_decay": 0.0}`; `normprobe.decay_groups(model, weight_decay, inputs)` makes such groups for any
    model. To decay parameters with two axes or more alone leaves out all of them, and biases.

    ## When to ignore it

    When the recipe decays gains on purpose, as some large runs do.

    ## References

    Loshchilov & Hutter 2019 (AdamW); van Laarhoven 2017, sec. 2 (decay beside normalisation).
    """

    code, name, severity, since = "NP114", "norm-weight-decay", Severity.WARNING, "0.1.0"
    needs = Needs.STRUCTURE | Needs.OPTIMIZER

    most: float = limit(
        0.0, unit=Unit.RATIO, source="choice: any decay of a gain is told; share of it that a step takes"
    )

    def check(self, data: ReportData) -> Outcome:
        """Yield one finding for all gains, or offsets, that decay."""
        known = data.measurements.optimizer
        assert known is not None  # else `run` has said so
        if known.foreign and not known.norms:
            yield self.skip(f"{NONE_HELD}, of which it is not known which is a norm's")
        yield from self._unknown(known)
        decayed = [step for step in known.norms if self._decays(known.groups[step.group])]
        gains = [step for step in decayed if step.part == "gain" and not step.one_plus]
        offsets = [step for step in decayed if step.part == "offset"]
        if gains:
            yield self._found(gains, known, known.gains, Severity.WARNING)
        elif offsets:
            yield self._found(offsets, known, known.offsets, Severity.NOTE)

    def _unknown(self, known: OptimizerMeasure) -> Outcome:
        """One skip for each reason why it is not known whether gains and offsets decay."""
        places: dict[str, list[str]] = {}
        for step in known.norms:
            group = known.groups[step.group]
            if _taken(group) is None:
                why = group.reason or "a step of a copy of it without gradient is not finite"
                places.setdefault(f"{why}, and its group says no weight_decay", []).append(step.path)
        for why, paths in places.items():
            yield self.skip(why, paths)

    def _decays(self, group: OptimizerGroup) -> bool:
        taken = _taken(group)
        return taken is not None and self.exceeds(taken, self.most)

    def _found(self, steps: Sequence[NormStep], known: OptimizerMeasure, count: int, severity: Severity) -> Finding:
        group = known.groups[steps[0].group]
        said = "" if group.weight_decay is None else f", weight_decay {number(group.weight_decay)}"
        each = "" if group.decay is None else f": a step without gradient takes {number(group.decay)} of each element"
        return self.finding(
            steps[0].path,
            f"{known.name} decays {len(steps)} of {count} {steps[0].part}s of norms "
            f"(group {steps[0].group}{said}){each}; normprobe.decay_groups makes groups that spare them",
            value=group.weight_decay if group.decay is None else group.decay,
            against="most",
            severity=severity,
            places=[step.path for step in steps],
        )


def _taken(group: OptimizerGroup) -> float | None:
    """What is measured to be taken off, else what the group says; None where neither is known."""
    return group.weight_decay if group.decay is None else group.decay
