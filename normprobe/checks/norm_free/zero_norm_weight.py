"""NP801."""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

from normprobe.checks.base import Outcome, Unit, limit, number
from normprobe.checks.norm_free.each_weight import EachWeightCheck, Slices
from normprobe.checks.norms.gains import looks_trained
from normprobe.records import Finding, ReportData, Severity

_DIVIDED = "Salimans & Kingma 2016, eq. 2: w = g · v / ‖v‖"


@final
@dataclass(frozen=True)
class ZeroNormWeight(EachWeightCheck):
    """A weight is divided by a norm that is 0, or multiplied by a gain that is.

    ## What it measures

    For weights that are computed from others at every forward (weight norm's g · v / ‖v‖ in any spelling, spectral
    norm's W / σ): the L2 norm of every slice of v that is divided by its own norm. An error: a slice of zeros
    where no eps guards the division, and one that holds NaN or infinity. A warning: a slice of zeros with an eps,
    and a slice smaller than that eps. A norm counts as 0 where it is in the parameter's own dtype.

    Also gains g that are exactly 0, of standardised weights too: a note; a warning where they are more than half
    of the gain. All of them are a warning too, but where the weight ends a branch beside which the stream goes on:
    nothing is said of that in a fresh model, whose branches may start closed, and it is a note in a trained one.

    ## Why it matters

    0/0 is NaN, in this weight, in everything behind it, and after one step in all of the model. With an eps the
    weight is 0 instead; its gradient is divided by the eps, so that the first step throws the slice far away.
    Behind a gain of 0 an output is its bias whatever comes in, and v gets no gradient.

    ## What to do

    Draw v anew, or drop the output: pruning and zero initialisation have to act on g. Where a branch is to start
    closed, set g to 0 and leave v as it was drawn. Where v was loaded, look for missed keys (`weight_v` and
    `parametrizations.weight.original1` are the same tensor in two spellings).

    ## When to ignore it

    The notes: where outputs were pruned by their gain.

    ## References

    Salimans & Kingma 2016 (Weight Normalization), eq. 2 and 3; Miyato et al. 2018 (Spectral Normalization), eq. 8.
    """

    code, name, severity, since = "NP801", "zero-norm-weight", Severity.ERROR, "0.1.0"
    explains = "NP305", "NP504"

    many: float = limit(0.5, unit=Unit.RATIO, source="choice: half of the outputs, more than pruning alone leaves")

    def judge(self, weight: Slices, data: ReportData) -> Outcome:
        """Yield a finding for slices that hold nothing to divide, and one for gains of 0."""
        if weight.known.kind != "weight_standardization":
            found = (
                self.broken(weight, weight.of(weight.held.non_finite), _DIVIDED)
                or self._empty(weight)
                or self._small(weight)
            )
            if found is not None:
                yield found
        if weight.held.zero_gains:
            severity = self._closed(weight, looks_trained(data))
            if severity is not None:
                yield self._gain(weight, severity)

    def _empty(self, weight: Slices) -> Finding | None:
        held, known = weight.held, weight.known
        if not held.empty:
            return None
        text = f"the norm of {held.parameter} is 0 in {weight.of(held.empty)}: "
        if not known.zeros:
            text += "no eps guards the division, and the weight there is 0/0 = NaN"
        else:
            by = "" if known.floor is None else f", and its gradient is divided by {number(known.floor)}"
            text += f"the weight there is 0{by}"
        severity = Severity.WARNING if known.zeros else Severity.ERROR
        return self.finding(held.path, text, value=0.0, bound=0.0, source=_DIVIDED, severity=severity)

    def _small(self, weight: Slices) -> Finding | None:
        held, floor = weight.held, weight.known.floor
        if floor is None or not self.exceeds(held.smallest, least=floor):
            return None
        return self.finding(
            held.path,
            f"the norm of {held.parameter} is {number(held.smallest)} in slice {held.smallest_at} (median "
            f"{number(held.median)}), below the eps that guards its division: the weight "
            "there is smaller than its gain says",
            value=held.smallest,
            bound=floor,
            source="the eps of this weight, as recovered from what it computes",
            severity=Severity.WARNING,
        )

    def _closed(self, weight: Slices, trained: bool) -> Severity | None:
        """How bad gains of 0 are; None where the branch that they close may have started so."""
        held = weight.held
        if held.zero_gains == held.gains and weight.writes:
            return Severity.NOTE if trained else None
        return Severity.WARNING if self.exceeds(held.zero_gains / held.gains, self.many) else Severity.NOTE

    def _gain(self, weight: Slices, severity: Severity) -> Finding:
        held = weight.held
        every = f"all {held.gains}" if held.zero_gains == held.gains else f"{held.zero_gains} of {held.gains}"
        return self.finding(
            held.path,
            f"{weight.known.gain} is 0 in {every} elements: the weight there is 0 whatever {held.parameter} is",
            value=held.zero_gains / held.gains,
            bound=0.0,
            source=_DIVIDED,
            severity=severity,
        )
