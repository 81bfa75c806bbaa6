"""NP804."""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

from normprobe.checks.base import Outcome, number
from normprobe.checks.norm_free.each_weight import EachWeightCheck, Slices
from normprobe.checks.norms.gains import looks_trained
from normprobe.records import Finding, ReportData, Severity

_DIVIDED = "Qiao et al. 2019, sec. 2: each filter is divided by its standard deviation"


@final
@dataclass(frozen=True)
class ZeroVarianceFilter(EachWeightCheck):
    """A filter whose weights are standardised has no variance.

    ## What it measures

    For weights that are standardised at every forward (weight standardisation, scaled or not, as in BiT and
    NFNets): the standard deviation of the elements of every filter. A filter has none where its elements differ by
    no more than rounding leaves of equal numbers. An error: where no eps guards the division, and where an element
    is NaN or infinite. A warning: with an eps, and where the deviation is smaller than that eps (the root of one
    inside a root). A weight at the end of a branch may be all zeros in a fresh model, whose branches then start
    closed; in a trained one that is a note.

    ## Why it matters

    Less its mean such a filter is 0, whatever constant it holds: its output says nothing. Its gradient is divided
    by the eps, so that the first step makes a filter of noise as large as all others. Without an eps it is 0/0.
    A filter of one element, as of a depthwise convolution with a kernel of 1, never has a variance.

    ## What to do

    Draw the filter anew. Zero initialisation, pruning and constant kernels (blurs, averages) have to be kept out of
    standardised weights, or to act on their gain.

    ## When to ignore it

    Where filters were pruned by setting them to 0.

    ## References

    Qiao et al. 2019 (Weight Standardization), sec. 2; Brock et al. 2021 (Characterizing signal propagation),
    sec. 4 (scaled weight standardisation).
    """

    code, name, severity, since = "NP804", "zero-variance-filter", Severity.ERROR, "0.1.0"
    explains = ("NP504",)

    def judge(self, weight: Slices, data: ReportData) -> Outcome:
        """Yield one finding where filters cannot be divided by their deviation."""
        if weight.known.kind != "weight_standardization":
            return
        found = (
            self.broken(weight, _filters(weight, weight.held.non_finite), _DIVIDED)
            or self._empty(weight, looks_trained(data))
            or self._small(weight)
        )
        if found is not None:
            yield found

    def _empty(self, weight: Slices, trained: bool) -> Finding | None:
        held, known = weight.held, weight.known
        closed = held.empty == held.count and weight.writes
        if not held.empty or (closed and known.zeros and not trained):
            return None
        why = "a filter of one element" if held.elements == 1 else "its elements are all the same"
        text = f"{held.parameter} has no variance in {_filters(weight, held.empty)} ({why}): "
        if not known.zeros:
            text += "no eps guards the division, and the filter is 0/0 = NaN"
        else:
            by = "" if known.floor is None else f", and its gradient is divided by {number(known.floor)}"
            text += f"standardised it is 0{by}"
        severity = Severity.ERROR if not known.zeros else Severity.NOTE if closed else Severity.WARNING
        return self.finding(held.path, text, value=0.0, bound=0.0, source=_DIVIDED, severity=severity)

    def _small(self, weight: Slices) -> Finding | None:
        held, floor = weight.held, weight.known.floor
        if held.empty or floor is None or not self.exceeds(held.smallest, least=floor):
            return None
        return self.finding(
            held.path,
            f"the standard deviation of {held.parameter} is {number(held.smallest)} in filter {held.smallest_at} "
            f"(median {number(held.median)}), below the eps that guards its division: standardised, it is "
            "smaller than the others",
            value=held.smallest,
            bound=floor,
            source="the eps of this weight, as recovered from what it computes",
            severity=Severity.WARNING,
        )


def _filters(weight: Slices, count: int) -> str:
    return weight.of(count, "filters", "its only filter")
