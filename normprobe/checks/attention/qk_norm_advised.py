"""NP405."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import final

from normprobe.checks.attention.each_site import EachSiteCheck, Pair, largest, matched, product, share
from normprobe.checks.base import Needs, Outcome, Unit, limit, number
from normprobe.checks.norms.gains import looks_drawn
from normprobe.records import Finding, Fix, ReportData, Severity

_DISTILLED = (Fix(rewrite="AddQKNorm", settings={"start": "distilled"}, at_places=True),)


@final
@dataclass(frozen=True)
class QKNormAdvised(EachSiteCheck):
    """Attention logits are large, and nothing bounds them.

    ## What it measures

    The largest logit over the sampled rows of sites that have neither norms on queries and keys nor a soft cap, with
    the RMS of queries and keys where they were seen, and beside it what QK-Norm would allow: scale · head width,
    which is √d at the usual scale, times the gains. Of sites whose logits carry a position bias q·k alone is judged;
    they are skipped where it was not seen. Logits that are not finite are left to NP401 and NP504.

    ## Why it matters

    Logits are a product of two signals that both grow while a model is trained: they grow fastest of all. Norms on
    queries and keys bound them whatever the weights do, and let larger learning rates through. A soft cap bounds them
    as well, at the price of kernels that know it.

    ## What to do

    In a model that is to be trained (further): norms on queries and keys, over the head width, before the rotary
    embedding. In a trained one they change the outputs: start their gains from measured RMS, and train on.

    ## When to ignore it

    When the model is only served.

    ## References

    Henry et al. 2020 (Query-Key Normalization); Dehghani et al. 2023 (ViT-22B), sec. 2; Wortsman et al. 2023, sec.
    3.1.1.
    """

    code, name, severity, since = "NP405", "qk-norm-advised", Severity.NOTE, "0.1.0"
    needs = Needs.STRUCTURE | Needs.FORWARD

    fixes = (Fix(rewrite="AddQKNorm", at_places=True),)

    max_logit: float = limit(
        25.0,
        unit=Unit.LOGIT,
        source="choice: half of NP401's limit; sound models without it stay below 19 or reach 78 "
        "(docs/calibration.md#attention)",
    )

    def check(self, data: ReportData) -> Outcome:
        """Yield one note for all sites that would gain from QK-Norm."""
        pairs = matched(data)
        yield from self.unmeasured(data, pairs)
        free = [pair for pair in pairs if pair.known and not any(s.qk_norm or s.softcap for s in pair.known)]
        large = [pair for pair in free if self._large(largest(pair.measure)) or self._large(_size(pair))]
        unseen = [pair.measure.path for pair in large if math.isnan(_size(pair))]
        if unseen:
            yield self.skip("the logits are large and carry a position bias, q·k alone was not measured", unseen)
        over = [pair for pair in large if self._large(_size(pair))]
        if over:
            yield self._found(over, len(pairs), data)

    def _large(self, logit: float) -> bool:
        return math.isfinite(logit) and self.exceeds(logit, self.max_logit)

    def _found(self, over: list[Pair], count: int, data: ReportData) -> Finding:
        worst = max(over, key=_size)
        site = worst.known[0]
        head = max(worst.measure.heads, key=lambda one: (one.uncapped_max or 0.0) if site.biased else one.sampled_max)
        told = head.q_rms is not None and head.k_rms is not None
        size = f", queries have RMS {number(head.q_rms or 0.0)}, keys {number(head.k_rms or 0.0)}" if told else ""
        allowed = None if site.scale is None else site.scale * site.head_dim
        normed = "" if allowed is None else f"; with QK-Norm at gains of 1 they reach {number(allowed)}"
        return self.finding(
            worst.measure.path,
            f"logits{' without their position bias' if site.biased else ''} reach {number(_size(worst))} in head "
            f"{head.head} and nothing bounds them{size}{normed}{share(len(over), count, 'is', 'are')} so",
            value=_size(worst),
            against="max_logit",
            places=[pair.measure.path for pair in over],
            fixes=None if looks_drawn(data) else _DISTILLED,
        )


def _size(pair: Pair) -> float:
    """The largest logit of a site, without a position bias; NaN where that was not seen."""
    return product(pair.measure) if any(site.biased for site in pair.known) else largest(pair.measure)
