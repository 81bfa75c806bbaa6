"""NP607."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import final

from normprobe.checks.base import Outcome, SweepCheck, Unit, limit, number
from normprobe.records import Finding, Severity
from normprobe.records.sweep import ModuleScale, SweepReport

_CHOICE = "choice: below 1/2, the smallest exponent that theory knows; sound sweeps that go one way gave 0.38"
_WIDTHS = 3  # of fewer one that fluctuates makes the exponent alone


@final
@dataclass(frozen=True)
class WidthDependent(SweepCheck):
    """What a module gives, or how far a step moves it, depends on the width of the model.

    ## What it measures

    In `normprobe sweep TARGET --widths …` or `normprobe.coordinate_check`: the exponents, by width, of the RMS of
    every module's output after a few steps of Adam or SGD, and of how far these steps moved it. Under muP
    (normprobe's parameter groups with initial scales, or models that `normprobe.MuP` rewrote) both should be 0 but
    for readouts, which start smaller. A warning: an output or its movement grows there, or its movement shrinks, from
    each width to the next by half of the limit at least; or it is not finite at a width. Of two widths alone that is a
    note: chance at one of them is all that a rise needs.
    Under the standard parametrisation growth is what theory expects; it is a note. A sweep over depths is not
    judged.

    ## Why it matters

    Where outputs move by an amount that depends on the width, a learning rate that was tuned on a small model is
    too large for a wide one, or leaves a part of it as it was drawn. muP makes all of it transfer; one factor that
    it does not know of is enough to lose that.

    ## What to do

    For the warning: look for a factor of the width that no parameter holds, at the first place: embeddings times
    √width, sums over features, attention scaled by 1/√d where heads grow, a multiplier on the logits. Divide it out,
    relative to the base width. For the note: rewrite the model with `normprobe.MuP` and train it with
    `normprobe.parameter_groups`, or tune the rate at every width.

    ## When to ignore it

    When models of one width alone are trained. Three widths below 64 fluctuate nearly as much as the limit.

    ## References

    Yang et al. 2022 (Tensor Programs V), table 3 and appendix D.1 (the coordinate check).
    """

    code, name, severity, since = "NP607", "width-dependent", Severity.WARNING, "0.1.0"

    grows: float = limit(0.4, unit=Unit.ONE, source=_CHOICE)
    vanishes: float = limit(-0.4, unit=Unit.ONE, source=_CHOICE, least=-math.inf)

    def judge(self, sweep: SweepReport) -> Outcome:
        """Yield one finding for what grows under each parametrisation, and one for what vanishes under muP."""
        if sweep.axis != "width":
            yield self.skip("the sweep is over depths")
            return
        for one in sweep.sweeps:
            standard = one.parametrisation == "standard"
            exponents = {row.path: self._exponent(row, sweep.sizes) for row in one.modules}
            grown = [row for row in one.modules if self.exceeds(exponents[row.path], self.grows)]
            if grown:
                worst = max(exponents[row.path] for row in grown)
                open_ = standard or (len(sweep.sizes) < _WIDTHS and math.isfinite(worst))
                yield self._found(grown, len(exponents), worst, "grows", standard, Severity.NOTE if open_ else None)
            gone = [row for row in one.modules if row not in grown and self._vanishes(row, sweep.sizes)]
            if gone and not standard:
                worst = min(row.update_slope for row in gone)
                severity = Severity.NOTE if len(sweep.sizes) < _WIDTHS else None
                yield self._found(gone, len(exponents), worst, "vanishes", False, severity)

    def _exponent(self, row: ModuleScale, sizes: Sequence[int]) -> float:
        """The larger exponent of what rises from each width to the next; infinite where an output is not finite."""
        if not all(map(math.isfinite, row.activation)):
            return math.inf
        pairs = (row.activation, row.activation_slope), (row.update, row.update_slope)
        return max((slope for values, slope in pairs if _least(values, sizes) > self.grows / 2), default=0.0)

    def _vanishes(self, row: ModuleScale, sizes: Sequence[int]) -> bool:
        least = -_least([1 / value if value > 0 else math.nan for value in row.update], sizes)
        return least < self.vanishes / 2 and self.exceeds(row.update_slope, least=self.vanishes)

    def _found(
        self,
        rows: Sequence[ModuleScale],
        known: int,
        worst: float,
        against: str,
        standard: bool,
        severity: Severity | None,
    ) -> Finding:
        what = "give or move by more" if against == "grows" else "move by less"
        under = "the standard parametrisation" if standard else "muP"
        return self.finding(
            rows[0].path,
            f"under {under} {len(rows)} of {known} modules {what} the wider the model is, by width^{number(worst)} at "
            "most" + (": a learning rate tuned at one width does not serve another" if standard else ""),
            value=worst,
            against=against,
            severity=severity,
            places=[row.path for row in rows],
        )


def _least(values: Sequence[float], sizes: Sequence[int]) -> float:
    """The least exponent of `values` between two neighbouring sizes; -inf where one is not above 0 or not finite."""
    if not all(0 < value < math.inf for value in values):
        return -math.inf
    pairs = zip(pairwise(values), pairwise(sizes), strict=True)
    return min(math.log(later / earlier) / math.log(large / small) for (earlier, later), (small, large) in pairs)
