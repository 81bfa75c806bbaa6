"""NP209."""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

from normprobe.checks.base import Check, Outcome
from normprobe.records import AttentionSite, ReportData, Severity

_SOFTMAX = ("softmax", "attention", "attn", "exp")  # of other weights, a rectifier's say, no logit is too large


@final
@dataclass(frozen=True)
class LopsidedQKNorm(Check):
    """Only one of query and key is normed between its projection and their product.

    ## What it measures

    The norms on the way from the projection of each operand to q·kᵀ. A site is reported where a norm stands on
    one of the two ways and none on the other, and both ways were followed back to their weights.

    ## Why it matters

    QK-Norm bounds a logit by the product of two lengths. With one of them free, logits grow with the other
    projection as they would without any norm, and the learned gain on the normed side hides that. Mostly the
    second call was forgotten, or a conversion lost it.

    ## What to do

    Norm the other operand as well, over the same axis. A trained model needs to be tuned again afterwards: its
    logits change.

    ## When to ignore it

    When the other operand is bounded in another way, as by a norm before its projection and a bounded weight.
    Keys that are the queries at unit length (Reformer), and logits of which no softmax is taken (indexers that
    only choose keys), are not reported.

    ## References

    Henry et al. 2020 (Query-Key Normalization), sec. 3; Dehghani et al. 2023 (ViT-22B), sec. 2: both queries
    and keys are normed.
    """

    code, name, severity, since = "NP209", "lopsided-qk-norm", Severity.WARNING, "0.1.0"

    def check(self, data: ReportData) -> Outcome:
        """Yield one finding for every site of which one operand alone is normed."""
        if not data.anatomy.attention:
            yield self.skip("no attention site was found")
        unknown: list[str] = []
        for site in data.anatomy.attention:
            sides = _sides(site)
            if sides is None or not _bounds(site):
                continue
            has, lacks = sides
            if not {"q", "k"} <= site.columns.keys():
                unknown.append(site.path)
                continue
            norm = site.qk_norm.query or site.qk_norm.key if site.qk_norm is not None else None
            yield self.finding(
                site.path,
                f"{has} are normed before q·kᵀ and {lacks} are not: {lacks} of any length make logits of any size",
                value=norm.rpartition(".")[2] if norm is not None else None,
                source="Henry et al. 2020, sec. 3",
            )
        if unknown:
            yield self.skip("one operand is normed; the other could not be followed to its projection", unknown)


def lopsided(site: AttentionSite) -> bool:
    """Whether one of queries and keys alone is normed, and both came from known weights."""
    return _sides(site) is not None and _bounds(site) and {"q", "k"} <= site.columns.keys()


def _bounds(site: AttentionSite) -> bool:
    """Whether queries and keys are two things of which a softmax is taken."""
    return not _shared(site) and any(word in site.kernel for word in _SOFTMAX)


def _shared(site: AttentionSite) -> bool:
    """Whether queries and keys come from the same rows of the same weight: keys are queries of unit length then."""
    query, key = site.columns.get("q"), site.columns.get("k")
    return query is not None and query == key


def _sides(site: AttentionSite) -> tuple[str, str] | None:
    """The operand that is normed and the one that is not; None where both are, or none."""
    norm = site.qk_norm
    if norm is None or bool(norm.query) == bool(norm.key):
        return None
    return ("queries", "keys") if norm.query else ("keys", "queries")
