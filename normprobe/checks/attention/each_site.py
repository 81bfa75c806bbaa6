"""What the checks share that judge attention: measured sites beside those of the Anatomy, and words for both."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from normprobe.checks.base import Check, Outcome, number
from normprobe.records import AttentionMeasure, AttentionSite, HeadLogits, ReportData
from normprobe.theory import format_of


class Pair(NamedTuple):
    """A measured site with those of the Anatomy that it may be: one, but where sites of one module are missing."""

    measure: AttentionMeasure
    known: list[AttentionSite]


def matched(data: ReportData) -> list[Pair]:
    """Every measured site with those of the Anatomy that it may be.

    Sites in one module share its path: they are matched by their order, which needs as many measures as sites. Where
    some are missing, each measure may be any of them.
    """
    anatomy: dict[str, list[AttentionSite]] = {}
    for site in data.anatomy.attention:
        anatomy.setdefault(site.path, []).append(site)
    counts = Counter(measure.path for measure in data.measurements.attention)
    pairs: list[Pair] = []
    turn = Counter[str]()
    for measure in data.measurements.attention:
        known, order = anatomy.get(measure.path, []), turn[measure.path]
        turn[measure.path] += 1
        if measure.heads:
            pairs.append(Pair(measure, known[order : order + 1] if len(known) == counts[measure.path] else known))
    return pairs


@dataclass(frozen=True)
class EachSiteCheck(Check):
    """Base of a check of measured logits: says which sites were not measured, and leaves NaN to NP504."""

    def unmeasured(self, data: ReportData, pairs: Iterable[Pair]) -> Outcome:
        """One skip for the sites of the Anatomy that were not measured, or because there are none."""
        found = list(pairs)
        missing = Counter(site.path for site in data.anatomy.attention) - Counter(pair.measure.path for pair in found)
        if missing:
            yield self.skip("its logits were not measured", missing)
        elif not found:
            yield self.skip("no attention site was found")


def to_first(head: HeadLogits) -> float:
    """The probability on the first key and on sinks, which trained heads park what they do not need."""
    return head.first_token + (head.sink or 0.0)


def mean(numbers: Iterable[float]) -> float:
    """Of those that are finite; NaN where there are none."""
    told = [number for number in numbers if math.isfinite(number)]
    return statistics.fmean(told) if told else math.nan


def share(some: int, count: int, one: str, several: str) -> str:
    """`; 2 of 3 attention sites exceed`, with the verb that fits."""
    whole = f"{count} attention site" + ("" if count == 1 else "s")
    return f"; {some} of {whole} {one if some == 1 else several}"


def overflow(pair: Pair) -> str:
    """How queries and keys of a site make logits that are not finite, though they are finite themselves and their
    product is alone too large for its dtype; empty where that is not so, or not known."""
    form = format_of(pair.measure.basis.dtype)
    features = max((site.head_dim for site in pair.known), default=1)
    for head in pair.measure.heads:
        q, k = head.q_rms, head.k_rms
        if form is None or q is None or k is None or math.isfinite(head.sampled_max):
            continue
        if math.isfinite(q) and math.isfinite(k) and q * k * features > form.largest:
            sizes = f"of RMS {number(q)} and {number(k)} over {features} features"
            return f"queries and keys {sizes} in head {head.head} are finite, and their product overflows {form.name}"
    return ""


def rank(value: float) -> float:
    """A key that puts what is not finite above every number."""
    return value if math.isfinite(value) else math.inf


def product(site: AttentionMeasure) -> float:
    """The largest scaled q·k of a site over the sampled rows, without soft cap and bias; NaN where it was not seen."""
    seen = [head.uncapped_max for head in site.heads if head.uncapped_max is not None]
    return max(seen, key=rank) if len(seen) == len(site.heads) else math.nan


def largest(site: AttentionMeasure) -> float:
    """The largest logit of a site over the sampled rows."""
    return max((head.sampled_max for head in site.heads), key=rank)
