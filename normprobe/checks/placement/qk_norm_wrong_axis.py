"""NP210."""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

from normprobe.checks.base import Check, Outcome
from normprobe.records import ReportData, Severity

_WRONG = {
    "tokens": "a statistic of theirs is taken over several tokens, so that a query depends on later ones",
    "heads": "a statistic of theirs is taken across heads, over one feature of each, and bounds no query's length",
}


@final
@dataclass(frozen=True)
class QKNormWrongAxis(Check):
    """Queries or keys are normed over tokens or across heads instead of over their features.

    ## What it measures

    What one statistic of the norms on queries and keys is taken of, followed from the rows of the projection
    through every view and transposition: the features of one head (Qwen 3, Gemma 3), all heads together
    (OLMo 2), or something that is neither. The shape of the gain decides nothing: one gain per head, as
    Cohere has it, is a norm over one head.

    ## Why it matters

    A view that parts the width as (features, heads) instead of (heads, features), or a norm before the
    transposition that it was meant for, runs without an error wherever sizes agree. A statistic over tokens
    lets earlier positions see later ones, and changes with the length of the input; across heads it bounds no
    logit, which is what QK-Norm is for.

    ## What to do

    Norm the last axis after the split into heads, or the whole projection before it.

    ## When to ignore it

    Never for causal models. Elsewhere, when the model was trained that way.

    ## References

    Henry et al. 2020 (Query-Key Normalization), sec. 3: norms along the head dimension; OLMo Team 2024 (2
    OLMo 2 Furious), sec. 3: over the whole projection.
    """

    code, name, severity, since = "NP210", "qk-norm-wrong-axis", Severity.ERROR, "0.1.0"

    def check(self, data: ReportData) -> Outcome:
        """Yield one finding for every site whose norms on query and key run over a wrong axis."""
        if not data.anatomy.attention:
            yield self.skip("no attention site was found")
        unknown = []
        for site in data.anatomy.attention:
            norm = site.qk_norm
            if norm is None:
                continue
            if norm.axis == "unknown":
                unknown.append(site.path)
            elif norm.axis in _WRONG:
                yield self.finding(
                    site.path,
                    f"queries and keys are normed on a wrong axis: {_WRONG[norm.axis]}",
                    value=norm.axis,
                    source="Henry et al. 2020, sec. 3",
                )
        if unknown:
            yield self.skip("it could not be told what the norms on queries and keys are taken of", unknown)
