"""NP402."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import final

from normprobe.checks.attention.each_site import EachSiteCheck, matched, mean, share, to_first
from normprobe.checks.base import Needs, Outcome, Unit, limit, number
from normprobe.records import AttentionMeasure, ReportData, Severity


@final
@dataclass(frozen=True)
class EntropyCollapse(EachSiteCheck):
    """All heads of an attention site look at almost one key each.

    ## What it measures

    The entropy of the attention probabilities of a row over ln(keys it may see), mean over the sampled rows and the
    heads of a site: 1 is uniform, 0 one key. The mean half width of the 99 % intervals is added first, so that a site
    is named where the sample leaves no doubt. Sites that put more than half of their probability on the first key or
    on a sink are left out: heads that have nothing to do park it there.

    ## Why it matters

    Attention that is one-hot passes no gradient to queries and keys, and the loss becomes sharp (the largest
    eigenvalue of its Hessian rises): collapse of whole layers goes before the divergence of a training. In a model
    that was converted it is the trace of a scale that was lost (NP404), as logits √d too large look so.

    ## What to do

    While training: QK-Norm, σReparam or a soft cap, a lower learning rate or a longer warmup. After a conversion: the
    scale of q·k, the norms of queries and keys, the gains of these.

    ## When to ignore it

    When every row may see two or three keys alone, as in a short window.

    ## References

    Zhai et al. 2023 (Stabilizing Transformer Training by Preventing Attention Entropy Collapse), sec. 3; Xiao et al.
    2024 (attention sinks).
    """

    code, name, severity, since = "NP402", "entropy-collapse", Severity.WARNING, "0.1.0"
    needs = Needs.STRUCTURE | Needs.FORWARD

    least_entropy: float = limit(
        0.15,
        unit=Unit.RATIO,
        source="choice: half of the smallest of sound sites (docs/calibration.md#attention)",
    )
    most_to_first: float = limit(0.5, unit=Unit.RATIO, source="choice: the larger part of the probability")

    def check(self, data: ReportData) -> Outcome:
        """Yield one finding for all sites that have collapsed."""
        pairs = matched(data)
        yield from self.unmeasured(data, pairs)
        told = [(_entropy(pair.measure), pair.measure) for pair in pairs]
        unknown = [measure.path for entropy, measure in told if math.isnan(entropy)]
        if unknown:
            yield self.skip("no row sees two keys, or a logit is NaN (NP504)", unknown)
        over = [(entropy, measure) for entropy, measure in told if self._collapsed(entropy, measure)]
        if over:
            entropy, worst = min(over, key=lambda pair: pair[0])
            yield self.finding(
                worst.path,
                f"the mean entropy of {len(worst.heads)} heads is at most {number(entropy)} of that of uniform "
                f"attention, with {number(mean(map(to_first, worst.heads)))} of the probability on the first key or a "
                f"sink"
                f"{share(len(over), len(told), 'has', 'have')} collapsed",
                value=entropy,
                against="least_entropy",
                places=[measure.path for _, measure in over],
            )

    def _collapsed(self, entropy: float, measure: AttentionMeasure) -> bool:
        low = not math.isnan(entropy) and self.exceeds(entropy, least=self.least_entropy)
        return low and mean(map(to_first, measure.heads)) <= self.most_to_first


def _entropy(measure: AttentionMeasure) -> float:
    """The mean over the heads, at the upper end of its interval."""
    return mean(head.entropy + head.margins.entropy for head in measure.heads)
