"""NP403."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import final

from normprobe.checks.attention.each_site import EachSiteCheck, Pair, matched, to_first
from normprobe.checks.base import Needs, Outcome, Unit, limit, number
from normprobe.records import Finding, HeadLogits, ReportData, Severity


@final
@dataclass(frozen=True)
class SaturatedHeads(EachSiteCheck):
    """Many heads give one key more than 99 % of the probability, in most rows.

    ## What it measures

    For every head the share of the sampled rows whose largest probability exceeds 0.99, less the half width of its 99
    % interval. A head is saturated where that is more than half and its mean probability on the first key or a sink
    is not. Found where more than a tenth of all heads of the model are.

    ## Why it matters

    Softmax has no gradient where it is one-hot: such heads learn no more, and what they attend to is decided by
    rounding once the logits grow further (NP401). A few saturated heads are common in trained models (the previous
    token, the separator). Many in a new model mean that logits are too large at the start: a scale that does not fit
    the head width, or queries and keys that are drawn too large.

    ## What to do

    In a new model: compare the standard deviation of the logits with 1, look at NP404, draw the query and key weights
    smaller. In training: QK-Norm, a soft cap.

    ## When to ignore it

    In a trained model, where it is a note, if its quality is what it should be.

    ## References

    Vaswani et al. 2017, sec. 3.2.1 (large products push softmax to where its gradient is small); Zhai et al. 2023;
    Dehghani et al. 2023 (ViT-22B), sec. 2.
    """

    code, name, severity, since = "NP403", "saturated-heads", Severity.WARNING, "0.1.0"
    needs = Needs.STRUCTURE | Needs.FORWARD

    max_rows: float = limit(0.5, unit=Unit.RATIO, source="choice: most rows")
    max_heads: float = limit(
        0.1, unit=Unit.RATIO, source="choice: sound models have 1 in 72 (docs/calibration.md#attention)"
    )

    def check(self, data: ReportData) -> Outcome:
        """Yield at most one finding for the model."""
        pairs = matched(data)
        yield from self.unmeasured(data, pairs)
        unknown = [pair.measure.path for pair in pairs if any(math.isnan(h.saturated) for h in pair.measure.heads)]
        if unknown:
            yield self.skip("no row sees two keys, or a logit is NaN (NP504)", unknown)
        count = sum(len(pair.measure.heads) for pair in pairs)
        over = [(pair, head) for pair in pairs for head in pair.measure.heads if self._saturated(head)]
        if over and self.exceeds(len(over) / count, self.max_heads):
            yield self._found(over, count, data)

    def _saturated(self, head: HeadLogits) -> bool:
        sure = head.saturated - head.margins.saturated
        return not math.isnan(sure) and self.exceeds(sure, self.max_rows) and to_first(head) <= 0.5

    def _found(self, over: list[tuple[Pair, HeadLogits]], count: int, data: ReportData) -> Finding:
        pair, head = max(over, key=lambda one: one[1].saturated)
        init = data.measurements.init
        return self.finding(
            pair.measure.path,
            f"{len(over)} of {count} heads are saturated; head {head.head} of this site gives one key more than 99 % "
            f"in {100 * head.saturated:.3g} % of the rows, with logits of standard deviation {number(head.std)}",
            value=len(over) / count,
            against="max_heads",
            severity=Severity.NOTE if init is not None and init.trained else None,
            places=[one.measure.path for one, _ in over],
        )
