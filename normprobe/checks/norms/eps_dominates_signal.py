"""NP103."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import final

from normprobe.checks.base import Check, Needs, Outcome, Unit, limit, number
from normprobe.checks.declarations import stated
from normprobe.checks.norms.gains import looks_drawn
from normprobe.records import Finding, Fix, NormSite, ReportData, Severity, Stream, StreamMeasure

_KINDS = frozenset({"layernorm", "rmsnorm"})


@final
@dataclass(frozen=True)
class EpsDominatesSignal(Check):
    """An eps is not small beside the mean square of what the norm is given.

    ## What it measures

    Eps over the mean square v of the norm's input, for the layer and RMS norms that read a measured residual
    stream: before a branch, behind an add, and at the end. v is the square of the stream's RMS there (median
    over tokens); where the mean is subtracted what is left can only be smaller, and eps weighs more. With eps
    inside the root the output has the RMS √(v / (v + eps)) in place of 1. For an eps outside the root, and a
    clamp, the two are compared with √v.

    A note where the output is off by a few percent, so that a port with another eps gives visibly other
    numbers; a warning where it is off by a tenth. One finding of each tells the norm with the largest share.

    ## Why it matters

    A norm that is dominated by eps passes its input on, only scaled: the scale of the stream goes into the
    branch, and tokens of different size stay different. This happens right behind embeddings that are drawn
    small. And eps is no weight: it is in the config or in the kernel, so that a conversion changes it unseen.

    ## What to do

    In a new model draw the embedding larger, multiply it up, or take a smaller eps (`SetEps`). In a trained model keep
    eps exactly as it was in training, in every port.

    ## When to ignore it

    Before training, where the stream grows soon. Embeddings drawn with standard deviation 0.02 beside an eps
    of 1e-5 give 2.5 % and are passed.

    ## References

    Zhang & Sennrich 2019 (RMSNorm), sec. 4.1: the rescaling invariance that eps breaks.
    """

    code, name, severity, since = "NP103", "eps-dominates-signal", Severity.WARNING, "0.1.0"
    fixes = (Fix(rewrite="SetEps"),)
    needs = Needs.STRUCTURE | Needs.FORWARD

    noted: float = limit(
        0.05, unit=Unit.RATIO, source="choice: twice what embeddings of standard deviation 0.02 give beside eps 1e-5"
    )
    most: float = limit(0.2, unit=Unit.RATIO, source="choice: the RMS of the output is a tenth below what it should be")

    def check(self, data: ReportData) -> Outcome:
        """Yield one warning and one note, for the norms whose eps is not small beside their input."""
        known = {measure.stream: measure for measure in data.measurements.residual}
        missing = [stream.name for stream in data.anatomy.streams if stream.name not in known]
        if missing:
            yield self.skip("the stream was not measured", missing)
        elif not data.anatomy.streams:
            yield self.skip("no residual stream was found")
        smallest: dict[str, float] = {}
        for stream in data.anatomy.streams:
            if stream.name in known:
                for path, rms in _inputs(stream, known[stream.name]):
                    smallest[path] = min(rms, smallest.get(path, math.inf))
        norms = [(data.anatomy.norm(path), rms) for path, rms in smallest.items()]
        known_norms = [(norm, rms) for norm, rms in norms if norm is not None and _judgeable(norm, rms)]
        yield from self._judged(known_norms, self._smaller(known_norms, data))

    def _smaller(self, norms: list[tuple[NormSite, float]], data: ReportData) -> tuple[Fix, ...]:
        """An eps that is small beside all inputs; for new models, where the configuration states none."""
        inside = all(norm.eps_placement == "inside_sqrt" for norm in data.anatomy.norms if norm.executed)
        if not norms or not inside or not looks_drawn(data) or stated(data, "eps"):
            return ()
        most = self.noted * min(rms for _, rms in norms) ** 2
        least = min((norm.eps for norm, _ in norms if norm.eps), default=most)  # no norm gets a larger one than it has
        return (Fix(rewrite="SetEps", settings={"eps": min(float(f"1e{math.floor(math.log10(most))}"), least)}),)

    def _judged(self, norms: list[tuple[NormSite, float]], fixes: tuple[Fix, ...]) -> Outcome:
        shares = sorted(((_share(norm, rms), norm, rms) for norm, rms in norms), key=lambda one: -one[0])
        over = [one for one in shares if self.exceeds(one[0], self.noted)]
        high = [one for one in over if self.exceeds(one[0], self.most)]
        if high:
            yield self._found(high, len(norms), Severity.WARNING, "most", fixes)
        if len(over) > len(high):
            yield self._found(over[len(high) :], len(norms), Severity.NOTE, "noted", fixes)

    def _found(
        self,
        over: list[tuple[float, NormSite, float]],
        count: int,
        severity: Severity,
        against: str,
        fixes: tuple[Fix, ...],
    ) -> Finding:
        share, norm, rms = over[0]
        left = {"inside_sqrt": 1 / math.sqrt(1 + share), "outside_sqrt": 1 / (1 + share), "clamp": min(1.0, 1 / share)}
        measured = f"mean square {number(rms**2)}" if norm.eps_placement == "inside_sqrt" else f"RMS {number(rms)}"
        return self.finding(
            norm.path,
            f"eps {number(norm.eps or 0.0)} is {number(100 * share)} % of the {measured} that it gets: the output has "
            f"{number(left[norm.eps_placement])} of its scale; {len(over)} of {count} norms on streams exceed it",
            value=share,
            against=against,
            severity=severity,
            places=[site.path for _, site, _ in over],
            fixes=fixes,
        )


def _judgeable(norm: NormSite, rms: float) -> bool:
    """Whether eps, its place and the size of the input are known, and the norm is along the stream's features."""
    known = norm.eps is not None and norm.eps_placement in ("inside_sqrt", "outside_sqrt", "clamp")
    return known and norm.kind in _KINDS and norm.axes == (-1,) and math.isfinite(rms) and rms > 0


def _share(norm: NormSite, rms: float) -> float:
    """Eps over what it is added to or compared with."""
    return (norm.eps or 0.0) / (rms**2 if norm.eps_placement == "inside_sqrt" else rms)


def _inputs(stream: Stream, measure: StreamMeasure) -> Iterator[tuple[str, float]]:
    """The norms that read the stream itself, and its RMS there."""
    for index, branch in enumerate(stream.branches):
        if branch.pre_norm is not None:
            yield branch.pre_norm, _before(stream, measure, index)
        behind = [state.rms_median for state in measure.states if state.branch >= index]
        if branch.post_norm is not None and behind:
            yield branch.post_norm, behind[0]
    if stream.final_norm is not None and measure.states:
        yield stream.final_norm, measure.states[-1].rms_median


def _before(stream: Stream, measure: StreamMeasure, index: int) -> float:
    """RMS of the stream where the branch reads it: for parallel branches, before the first of them."""
    while (
        index and stream.branches[index].parallel and stream.branches[index - 1].block == stream.branches[index].block
    ):
        index -= 1
    states = [state.rms_median for state in measure.states if state.branch < index]
    return states[-1] if states else measure.entry_rms
