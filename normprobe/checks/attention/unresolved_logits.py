"""NP401."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import final

from normprobe.checks.attention.each_site import (
    EachSiteCheck,
    Pair,
    largest,
    matched,
    overflow,
    product,
    rank,
    share,
)
from normprobe.checks.base import Needs, Outcome, Unit, limit, number
from normprobe.records import Finding, Fix, ReportData, Severity
from normprobe.theory import FORMATS, format_of

_BELOW = 0.95  # choice: clipped logits lie within 4 roundings of their limit, 3 % in bfloat16


@final
@dataclass(frozen=True)
class UnresolvedLogits(EachSiteCheck):
    """Attention logits are larger than training and half precision resolve.

    ## What it measures

    The largest attention logit of every head over the sampled query rows, after scale, soft-cap and mask. Where not
    all rows were looked at, also the bound max|q|·max|k|·|scale| (no more than the soft-cap): a note, when the
    bound alone exceeds the limit, since a larger logit cannot be ruled out. Where queries and keys are finite
    and their product alone is too large for its dtype, the logit counts as infinite, though some of its sums
    are NaN. Another NaN is no size, nor is a logit of queries or keys that are not finite themselves: such a
    site is left to NP504. Logits with a position bias (ALiBi, relative positions) are judged as softmax sees
    them where they are numbers of a half precision; where the bias is added in float32, which resolves the sum,
    q·k alone is judged, and sites that do not show it are skipped.

    ## Why it matters

    Logits that grow without limit end in attention that is one-hot, with a vanishing gradient for all other
    keys; that precedes the divergence of large models. And the larger a logit is, the coarser its grid: at
    64, neighbouring bfloat16 numbers are 0.5 apart, a factor of 1.65 in probability. A warning, not an error:
    models with large query and key biases work with logits above the limit, because softmax sees differences
    alone.

    ## What to do

    While training: QK-Norm, a soft-cap, QK-Clip, or a lower learning rate. For a trained model: compute
    logits and softmax in float32 and never in float16.

    ## When to ignore it

    In a trained model that is served with float32 logits and shows no saturated heads.

    ## References

    Gemma Team 2024 (Gemma 2), sec. 2 (attention logits capped at 50); Kimi Team 2025 (Kimi K2), sec. 2.1
    (QK-Clip at 100); Dehghani et al. 2023 (ViT-22B), sec. 2 and Wortsman et al. 2023, sec. 3.1.1 (divergence
    by logit growth); Zhai et al. 2023 (entropy collapse).
    """

    code, name, severity, since = "NP401", "unresolved-logits", Severity.WARNING, "0.1.0"
    needs = Needs.STRUCTURE | Needs.FORWARD

    fixes = (Fix(rewrite="QKClip"),)

    max_logit: float = limit(
        50.0, unit=Unit.LOGIT, source="Gemma Team 2024 (Gemma 2), sec. 2: the cap on attention logits"
    )

    def check(self, data: ReportData) -> Outcome:
        """Yield one warning for all sites with too large logits, and one note for those with too large a
        bound."""
        pairs = matched(data)
        yield from self.unmeasured(data, pairs)
        lost = [pair.measure.path for pair in pairs if _lost(pair)]
        if lost:
            yield self.skip("a logit is NaN, or queries or keys are not finite (NP504)", lost)
        rest = [pair for pair in pairs if not _lost(pair)]
        unseen = [p for p in rest if math.isnan(_size(p)) and self.exceeds(largest(p.measure), self.max_logit)]
        if unseen:
            why = "its logits carry a position bias, q·k alone was not measured"
            yield self.skip(why, [pair.measure.path for pair in unseen])
        yield from self._judged([pair for pair in rest if not math.isnan(_size(pair))], len(pairs))

    def _judged(self, pairs: list[Pair], count: int) -> Outcome:
        over = [pair for pair in pairs if self.exceeds(_size(pair), self.max_logit)]
        if over:
            yield self._measured(over, count)
        loose = [pair for pair in pairs if pair not in over and not pair.measure.basis.exact and not _apart(pair)]
        loose = [pair for pair in loose if self.exceeds(_bound(pair), self.max_logit)]
        if loose:
            yield self._bounded(loose, count)

    def _measured(self, over: list[Pair], count: int) -> Finding:
        pair = max(over, key=lambda one: rank(_size(one)))
        size, apart = _size(pair), _apart(pair)
        head = max(pair.measure.heads, key=lambda one: rank((one.uncapped_max or 0.0) if apart else one.sampled_max))
        biased = any(site.biased for site in pair.known)
        bias = f" {'without' if apart else 'with'} their position bias" if biased else ""
        made = f" ({told})" if (told := overflow(pair)) else ""
        return self.finding(
            pair.measure.path,
            f"logits{bias} reach {number(size)} in head {head.head}{_grid(size, _dtype(pair))}{made}"
            f"{share(len(over), count, 'exceeds', 'exceed')} the limit",
            value=size,
            against="max_logit",
            places=[one.measure.path for one in over],
            fixes=(Fix(rewrite="QKClip", settings={"limit": _BELOW * self.max_logit}),) if math.isfinite(size) else (),
        )

    def _bounded(self, loose: list[Pair], count: int) -> Finding:
        worst = max(loose, key=lambda pair: rank(_bound(pair)))
        return self.finding(
            worst.measure.path,
            f"logits of up to {number(_bound(worst))} cannot be ruled out, though {worst.measure.rows} sampled rows "
            f"reach {number(largest(worst.measure))} at most{share(len(loose), count, 'has', 'have')} such a bound",
            value=_bound(worst),
            against="max_logit",
            severity=Severity.NOTE,
            places=[pair.measure.path for pair in loose],
            fixes=(),
        )


def _dtype(pair: Pair) -> str:
    return pair.measure.basis.dtype if pair.measure.grid == "unknown" else pair.measure.grid


def _apart(pair: Pair) -> bool:
    """Whether q·k is to be judged apart from a position bias: their sum is resolved."""
    form = format_of(_dtype(pair))
    return any(site.biased for site in pair.known) and (form is None or form.epsilon < FORMATS["float16"].epsilon)


def _size(pair: Pair) -> float:
    """The logit to judge, infinite where it overflows; NaN where it was not seen."""
    if overflow(pair):
        return math.inf
    if not _apart(pair):
        return largest(pair.measure)
    caps = [math.inf if site.softcap is None else site.softcap for site in pair.known]
    return min(product(pair.measure), max(caps))


def _lost(pair: Pair) -> bool:
    """Whether a logit is NaN that does not overflow, or queries or keys are known not to be finite."""
    heads = pair.measure.heads
    if overflow(pair):
        return False
    seen = [rms for head in heads for rms in (head.q_rms, head.k_rms) if rms is not None]
    unknown = any(math.isnan(head.sampled_max) or math.isnan(head.bound) for head in heads)
    return unknown or not all(map(math.isfinite, seen))


def _bound(pair: Pair) -> float:
    """The largest bound, no more than the soft-cap where all sites that this may be have the same and add no bias."""
    caps = {None if site.biased else site.softcap for site in pair.known}
    softcap = caps.pop() if len(caps) == 1 else None
    bound = max((head.bound for head in pair.measure.heads), key=rank)
    return min(bound, softcap) if softcap is not None and math.isfinite(bound) else bound


def _grid(size: float, dtype: str) -> str:
    form = format_of(dtype)
    if form is None or not math.isfinite(size):
        return ""
    return f", where neighbouring {form.name} numbers are {number(form.spacing(size))} apart"
