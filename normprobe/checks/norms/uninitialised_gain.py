"""NP109."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

from normprobe.checks.base import Outcome, Unit, limit, number
from normprobe.checks.norms.gains import HUGE, RESET, SEVERAL, GainCheck, Stored, looks_drawn, of
from normprobe.records import Elements, Finding, Fix, ReportData, Severity

_SOURCE = "torch.empty: the values of fresh memory are undefined"


@final
@dataclass(frozen=True)
class UninitialisedGain(GainCheck):
    """A gain or offset holds what memory happened to hold, or what no recipe gives a norm.

    ## What it measures

    The stored gain and offset of every norm that runs. An error: an element that is NaN or infinite, one whose
    size no trained norm comes near, or values so small (below 2⁻¹²⁶) that arithmetic hardly makes them and
    reused memory is full of them. Batch norms may be driven there by weight decay and are told by the last
    sign only where the model's weights are as they were drawn.

    In such a fresh model also, as a warning: a gain with both signs, or far from 1; and a constant that no
    other norm in the same role has, where all of those share another.

    ## Why it matters

    A model that is built on the meta device and moved with `to_empty` gets memory as it lies. Who then calls
    `reset_parameters` or the model's own init function misses every norm class without one, and the run
    starts with NaN or with all activations gone; on another machine, with zeroed memory, it seems to work.

    ## What to do

    Set gains to 1 (0 where 1 + w is used) and offsets to 0 after `to_empty`, as `Initialise` does, and give the norm's
    class a `reset_parameters`. For a converted checkpoint, look for keys that were missed in loading.

    ## When to ignore it

    The warnings: where the gains were drawn on purpose.

    ## References

    The documentation of torch.empty and torch.nn.Module.to_empty; Ba et al. 2016, sec. 3 and the supplement
    (gains start at 1, offsets at 0). Gains that are all 0 are NP110's.
    """

    code, name, severity, since = "NP109", "uninitialised-gain", Severity.ERROR, "0.1.0"
    fixes = RESET

    largest: float = limit(
        HUGE,
        unit=Unit.ONE,
        source="choice: ten thousand times the gains of most trained models, below what memory holds",
    )
    subnormal: float = limit(
        0.01,
        unit=Unit.RATIO,
        source="choice: a share of elements; IEEE 754-2019, binary32 has its normal numbers above",
    )
    fresh_largest: float = limit(1e3, unit=Unit.ONE, source="choice: gains are drawn about 1 or set to it")
    fresh_smallest: float = limit(1e-4, unit=Unit.ONE, source="choice: below it only 0 is set on purpose")
    mixed: float = limit(0.1, unit=Unit.RATIO, source="choice: a share of elements with the rarer sign")

    def judge(self, norms: Sequence[Stored], data: ReportData) -> Outcome:
        """Yield one finding for each gain or offset that cannot have been set."""
        fresh = looks_drawn(data)
        for norm in norms:
            for name, held in norm.parts:
                fixes = None if fresh else ()
                text = self._garbage(held, norm.site.kind == "batchnorm" and not fresh)
                if text:
                    yield self._found(norm, name, text, held, fixes)
                elif fresh and name == "gain":
                    text = self._odd(held) or self._alone(norm, held, norms)
                    if text:
                        yield self._found(norm, name, text, held, fixes, Severity.WARNING)

    def _found(
        self,
        norm: Stored,
        name: str,
        text: str,
        held: Elements,
        fixes: tuple[Fix, ...] | None,
        severity: Severity | None = None,
    ) -> Finding:
        value = held.peak if not held.non_finite else float("nan")
        told = f"the {name} {text}" if severity is None else f"in a model as it was drawn, the {name} {text}"
        return self.finding(
            norm.site.path, told, value=value, source=_SOURCE, severity=severity, about=name, fixes=fixes
        )

    def _garbage(self, held: Elements, may_shrink: bool) -> str:
        """What no set or trained value explains; empty where there is nothing."""
        if held.non_finite:
            return f"is NaN or infinite in {of(held.non_finite, held.count)} elements"
        if self.exceeds(held.peak, self.largest):
            return f"reaches {number(held.peak)}"
        if not may_shrink and self.exceeds(held.subnormal / held.count, self.subnormal):
            return f"is not 0 but smaller than 2⁻¹²⁶ in {of(held.subnormal, held.count)} elements"
        return ""

    def _odd(self, held: Elements) -> str:
        """What no recipe draws; empty where there is nothing."""
        if held.typical and self.exceeds(held.typical, self.fresh_largest, least=self.fresh_smallest):
            return f"is {number(held.median)} in the median"
        rarer = min(held.negative, held.count - held.negative)
        if held.count >= SEVERAL and self.exceeds(rarer / held.count, self.mixed):
            return f"has both signs, {held.negative} of {held.count} elements below 0"
        return ""

    @staticmethod
    def _alone(norm: Stored, held: Elements, norms: Sequence[Stored]) -> str:
        """That the others in its role share another constant; empty where they do not, and where it is NP112's: a 1 + w
        of 2 where that of the others is 1."""
        others = [n.known.gain for n in norms if n.site.role == norm.site.role and n is not norm]
        values = Counter(gain.constant for gain in others if gain is not None)
        (common, times), *rest = values.most_common() or [(None, 0)]
        if held.constant in (None, 0, common) or common is None or rest or times < 2:
            return ""
        if norm.known.one_plus and (held.constant, common) == (2.0, 1.0):
            return ""
        return f"is {number(held.smallest)} throughout, and {number(common)} in the {times} others of its role"
