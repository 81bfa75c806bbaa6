"""NP115."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

from normprobe.checks.base import Check, Needs, Outcome, Unit, limit, number
from normprobe.checks.norms.norm_weight_decay import NONE_HELD
from normprobe.records import Finding, ReportData, Severity
from normprobe.records.optimizer import NormStep, OptimizerMeasure

_HALF = frozenset({"float16", "bfloat16"})


@final
@dataclass(frozen=True)
class FrozenByRounding(Check):
    """A half-precision gain does not move, because the optimiser's steps round to nothing.

    ## What it measures

    How many elements of every gain and offset stay as they are when a step of the given optimiser is added or
    subtracted in the dtype in which they are stored. The size of a step is that of a copy of the optimiser,
    where it does not follow the size of the gradient (Adam, Lion and their kin); where it does (SGD), what the gradient
    of one batch makes, at level "backward", with its momentum at full speed. An optimiser that keeps what
    is rounded away is found out by letting the copy take 64 small steps, and passed.

    ## Why it matters

    Gains are about 1, where bfloat16 numbers are 0.004 apart below and 0.008 above. A step of 1e-4 is lost
    whole, every time: the norms keep the gains that they started with while the rest of the model, whose
    weights are small, trains. Nothing fails, and the loss falls.

    ## What to do

    Keep norm parameters in float32, or master copies of them; or use an optimiser that rounds stochastically
    or compensates. Autocast with float32 parameters has no such fault.

    ## When to ignore it

    When the gains are meant to stay.

    ## References

    Micikevicius et al. 2018, sec. 3.1 (master copies: updates smaller than 2⁻¹¹ of a weight are lost in
    float16); Zamirai et al. 2020 (Revisiting BFloat16 Training: nearest rounding of updates).
    """

    code, name, severity, since = "NP115", "frozen-by-rounding", Severity.WARNING, "0.1.0"
    needs = Needs.STRUCTURE | Needs.WEIGHTS | Needs.OPTIMIZER

    most: float = limit(0.5, unit=Unit.RATIO, source="choice: half of the elements of a gain")

    def check(self, data: ReportData) -> Outcome:
        """Yield one finding for all gains and offsets whose steps are lost."""
        known = data.measurements.optimizer
        assert known is not None  # else `run` has said so
        if known.foreign and not known.norms:
            yield self.skip(f"{NONE_HELD}, which keep what is rounded away")
        yield from self._unknown([step for step in known.norms if step.dtype in _HALF and step.lost is None], known)
        lost = [step for step in known.norms if step.lost is not None and self.exceeds(step.lost, self.most)]
        unsure = [step for step in lost if step.dtype not in _HALF] if _unmoved(data) else []
        if unsure:
            why = "batch norms have never been moved: in eval mode gradients are not those that training would have"
            yield self.skip(why, [step.path for step in unsure])
        lost = [step for step in lost if step not in unsure]
        if lost:
            yield self._found(lost, known)

    def _unknown(self, steps: Sequence[NormStep], known: OptimizerMeasure) -> Outcome:
        reasons = {step.path: known.groups[step.group].reason or "its values are not known" for step in steps}
        for why in dict.fromkeys(reasons.values()):
            yield self.skip(why, [path for path, reason in reasons.items() if reason == why])

    def _found(self, lost: Sequence[NormStep], known: OptimizerMeasure) -> Finding:
        worst = max(lost, key=lambda step: step.lost or 0.0)
        share, size = worst.lost or 0.0, worst.step or 0.0
        count = known.gains + known.offsets
        return self.finding(
            worst.path,
            f"a step of {number(size)} leaves {number(100 * share)} % of the {worst.part} as it is in {worst.dtype}; "
            f"{len(lost)} of {count} gains and offsets are held so",
            value=share,
            against="most",
            places=[step.path for step in lost],
        )


def _unmoved(data: ReportData) -> bool:
    """Whether a batch norm still has the statistics that it was made with."""
    found = data.measurements.batchnorm
    return found is not None and any(site.default and site.keeps == "moving" for site in found.sites)
