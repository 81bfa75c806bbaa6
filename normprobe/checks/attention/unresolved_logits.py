"""NP401."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass
from typing import TypeAlias, final

from normprobe.checks.base import Check, Needs, Outcome, Unit, limit, number
from normprobe.records import AttentionMeasure, AttentionSite, Finding, HeadLogits, ReportData, Severity
from normprobe.theory import format_of

_Pair: TypeAlias = tuple[AttentionMeasure, list[AttentionSite]]


@final
@dataclass(frozen=True)
class UnresolvedLogits(Check):
    """Attention logits are larger than training and half precision resolve.

    ## What it measures

    The largest attention logit of every head over the sampled query rows, after scale, soft-cap and mask.
    Where not all rows were looked at, also the bound max|q|·max|k|·|scale| (no more than the soft-cap): a
    note, when the bound alone exceeds the limit, since a larger logit cannot be ruled out. A NaN is no size: a
    site with a logit that is NaN is left to NP504. Where the logits carry a position bias (ALiBi, relative
    positions), their maximum is not that of q·k, and the site is skipped.

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

    max_logit: float = limit(
        50.0, unit=Unit.LOGIT, source="Gemma Team 2024 (Gemma 2), sec. 2: the cap on attention logits"
    )

    def check(self, data: ReportData) -> Outcome:
        """Yield one warning for all sites with too large logits, and one note for those with too large a
        bound."""
        pairs = _matched(data)
        missing = Counter(site.path for site in data.anatomy.attention) - Counter(site.path for site, _ in pairs)
        if missing:
            yield self.skip("its logits were not measured", missing)
        elif not pairs:
            yield self.skip("no attention site was found")
        reasons = [_unjudged(site, known) for site, known in pairs]
        for why in dict.fromkeys(filter(None, reasons)):
            yield self.skip(why, (site.path for (site, _), reason in zip(pairs, reasons, strict=True) if reason == why))
        yield from self._judged([pair for pair, reason in zip(pairs, reasons, strict=True) if not reason])

    def _judged(self, pairs: list[_Pair]) -> Outcome:
        sites = [site for site, _ in pairs]
        over = [site for site in sites if self.exceeds(_largest(site), self.max_logit)]
        if over:
            yield self._measured(over, len(sites))
        bounds = [(_bound(site, known), site) for site, known in pairs if not site.basis.exact]
        loose = [(b, site) for b, site in bounds if site not in over and self.exceeds(b, self.max_logit)]
        if loose:
            yield self._bounded(loose, len(sites))

    def _measured(self, over: list[AttentionMeasure], count: int) -> Finding:
        worst = max(over, key=lambda site: _rank(_largest(site)))
        head = max(worst.heads, key=lambda item: _rank(item.sampled_max))
        return self.finding(
            worst.path,
            f"logits reach {number(head.sampled_max)} in head {head.head}{_grid(head, worst.basis.dtype)}"
            f"{_share(len(over), count, 'exceeds', 'exceed')} the limit",
            value=head.sampled_max,
            against="max_logit",
            places=[site.path for site in over],
        )

    def _bounded(self, loose: list[tuple[float, AttentionMeasure]], count: int) -> Finding:
        bound, worst = max(loose, key=lambda pair: _rank(pair[0]))
        return self.finding(
            worst.path,
            f"logits of up to {number(bound)} cannot be ruled out, though {worst.rows} sampled rows reach "
            f"{number(_largest(worst))} at most{_share(len(loose), count, 'has', 'have')} such a bound",
            value=bound,
            against="max_logit",
            severity=Severity.NOTE,
            places=[site.path for _, site in loose],
        )


def _matched(data: ReportData) -> list[_Pair]:
    """Every measured site with those of the Anatomy that it may be.

    Sites in one module share its path: they are matched by their order, which needs as many measures as sites. Where
    some are missing, each measure may be any of them.
    """
    anatomy: dict[str, list[AttentionSite]] = {}
    for site in data.anatomy.attention:
        anatomy.setdefault(site.path, []).append(site)
    counts = Counter(measure.path for measure in data.measurements.attention)
    pairs: list[_Pair] = []
    turn = Counter[str]()
    for measure in data.measurements.attention:
        known, order = anatomy.get(measure.path, []), turn[measure.path]
        turn[measure.path] += 1
        if measure.heads:
            pairs.append((measure, known[order : order + 1] if len(known) == counts[measure.path] else known))
    return pairs


def _unjudged(site: AttentionMeasure, known: list[AttentionSite]) -> str:
    """Why the size of the logits is not judged here; empty where it is."""
    if any(math.isnan(head.sampled_max) or math.isnan(head.bound) for head in site.heads):
        return "a logit is NaN (NP504)"
    if any(one.biased for one in known):
        return "the logits carry a position bias, q·k alone was not measured"
    return ""


def _share(some: int, count: int, one: str, several: str) -> str:
    """`; 2 of 3 attention sites exceed`, with the verb that fits."""
    whole = f"{count} attention site" + ("" if count == 1 else "s")
    return f"; {some} of {whole} {one if some == 1 else several}"


def _rank(value: float) -> float:
    """A key that puts what is not finite above every number."""
    return value if math.isfinite(value) else math.inf


def _largest(site: AttentionMeasure) -> float:
    return max((head.sampled_max for head in site.heads), key=_rank)


def _bound(site: AttentionMeasure, known: list[AttentionSite]) -> float:
    """The largest bound, no more than the soft-cap where all sites that this may be have the same."""
    caps = {one.softcap for one in known}
    softcap = caps.pop() if len(caps) == 1 else None
    bound = max((head.bound for head in site.heads), key=_rank)
    return min(bound, softcap) if softcap is not None and math.isfinite(bound) else bound


def _grid(head: HeadLogits, dtype: str) -> str:
    form = format_of(dtype)
    if form is None or not math.isfinite(head.sampled_max):
        return ""
    return f", where neighbouring {form.name} numbers are {number(form.spacing(head.sampled_max))} apart"
