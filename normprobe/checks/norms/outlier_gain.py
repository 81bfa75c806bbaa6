"""NP111."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

from normprobe.checks.base import Outcome, Unit, limit, number
from normprobe.checks.norms.gains import SEVERAL, GainCheck, Stored, looks_drawn, unset
from normprobe.records import Finding, ReportData, Severity


@final
@dataclass(frozen=True)
class OutlierGain(GainCheck):
    """A norm's gain is far larger in one channel than in most others.

    ## What it measures

    The largest size of an element of the gain over the median size, of every norm with eight or more of them.
    A note above the first limit; a warning above the second, which no known trained layer or RMS norm comes
    near, and above the first in a model whose weights are as they were drawn, where gains lie about 1 still.
    Batch norms, whose gains training drives to zero channel by channel, are noted and not warned of. Gains
    that are not finite or beyond what anybody sets are left to NP109.

    ## Why it matters

    The norm gives every channel the same scale, and the gain takes that back: its output then has a channel
    that is so many times larger than the others. Integer quantisation of activations with one scale a row
    loses the others in it, and half precision sums them beside it. Trained language models have such channels
    in few norms; a factor of a thousand is more often a wrong value.

    ## What to do

    Fold the gain into the weights that read the norm before quantising, or scale it out as SmoothQuant does.
    For a warning, compare the channel with its checkpoint.

    ## When to ignore it

    When the model is not quantised and works.

    ## References

    Kovaleva et al. 2021 (BERT Busters), abstract (outlier channels of LayerNorm); Wei et al. 2022 (Outlier
    Suppression), sec. 3 (the gain makes the outliers); Xiao et al. 2023 (SmoothQuant), sec. 3 (outliers and int8).
    """

    code, name, severity, since = "NP111", "outlier-gain", Severity.WARNING, "0.1.0"

    noted: float = limit(
        30.0, unit=Unit.RATIO, source="choice: twice the largest in SmolLM2-135M (14, its first norm); MiniLM-L6 has 3"
    )
    most: float = limit(1000.0, unit=Unit.RATIO, source="choice: ten bits, more than bfloat16 keeps of a sum")

    def judge(self, norms: Sequence[Stored], data: ReportData) -> Outcome:
        """Yield one finding for all norms noted, and one for all warned of."""
        fresh = looks_drawn(data)
        ratios = [(_ratio(norm), norm) for norm in norms]
        over = [(ratio, norm) for ratio, norm in ratios if self.exceeds(ratio, self.noted)]
        sure = [(r, norm) for r, norm in over if fresh or self.exceeds(r, self.most)]
        warned = [(r, norm) for r, norm in sure if norm.site.kind != "batchnorm"]
        noted = [pair for pair in over if pair not in warned]
        if warned:
            yield self._found(warned, len(norms), Severity.WARNING, "noted" if fresh else "most", fresh)
        if noted:
            yield self._found(noted, len(norms), Severity.NOTE, "noted")

    def _found(
        self, over: list[tuple[float, Stored]], count: int, severity: Severity, against: str, fresh: bool = False
    ) -> Finding:
        ratio, worst = max(over, key=lambda pair: pair[0])
        gain = worst.known.gain
        assert gain is not None
        begun = "in a model as it was drawn, " if fresh else ""
        return self.finding(
            worst.site.path,
            f"{begun}the gain is {number(gain.peak)} in channel {gain.peak_at}, {number(ratio)} times the median size; "
            f"{len(over)} of {count} gains exceed the limit",
            value=ratio,
            against=against,
            severity=severity,
            places=[norm.site.path for _, norm in over],
        )


def _ratio(norm: Stored) -> float:
    """Largest over median size; 0 where there are few, or where NP109 or NP110 speak."""
    gain = norm.known.gain
    if gain is None or gain.count < SEVERAL or unset(gain) or not gain.typical:
        return 0.0
    return gain.peak / gain.typical
