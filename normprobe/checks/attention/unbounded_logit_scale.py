"""NP406."""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

from normprobe.checks.base import Check, Outcome
from normprobe.records import AttentionSite, ReportData, Severity


@final
@dataclass(frozen=True)
class UnboundedLogitScale(Check):
    """A learned factor on q·k has no largest value.

    ## What it measures

    Whether something on the way from the parameters of a learned scale of attention (a temperature) to the logits holds
    it under a largest value: a clamp with a maximum, a sigmoid, a softmax. What a training loop does to the parameter
    itself cannot be seen. Temperatures of other products, as of CLIP's contrastive logits, are not looked at: nothing
    tells them from the scale of any output.

    ## Why it matters

    With normed queries and keys the scale alone says how large logits become, and it grows as long as that lowers the
    loss; stored as a logarithm it grows exponentially. Then attention saturates, and norms on queries and keys no
    longer bound what they were put there for.

    ## What to do

    Clamp it in the forward as Swin v2 does (no more than 100), or the parameter after each step as CLIP does, and
    watch it.

    ## When to ignore it

    When the training loop clamps the parameter, or the model is trained and only served.

    ## References

    Liu et al. 2022 (Swin Transformer V2), sec. 3.3; Radford et al. 2021 (CLIP), sec. 2.5 (clipped at 100); Henry et al.
    2020 (Query-Key Normalization).
    """

    code, name, severity, since = "NP406", "unbounded-logit-scale", Severity.NOTE, "0.1.0"

    def check(self, data: ReportData) -> Outcome:
        """Yield one note for all sites with such a scale."""
        sites = data.anatomy.attention
        if not sites:
            yield self.skip("no attention site was found")
        free = [site for site in sites if site.scale_parameter is not None and site.scale_bounded is False]
        if free:
            yield self.finding(
                free[0].path,
                f"the factor on q·k comes from {_named(free)}, and nothing holds it under a largest value",
                source="Liu et al. 2022 (Swin Transformer V2), sec. 3.3; Radford et al. 2021 (CLIP), sec. 2.5",
                places=[site.path for site in free],
            )


def _named(sites: list[AttentionSite]) -> str:
    names = list(dict.fromkeys(site.scale_parameter for site in sites))
    return f"{names[0]}" + (f" and {len(names) - 1} more" if len(names) > 1 else "")
