"""NP308."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import final

from normprobe.checks.base import Needs, Outcome, Unit, limit, number
from normprobe.checks.residual.each_stream import EachStreamCheck, Measured, unless_trained
from normprobe.records import Severity

_MIXING = ("attention", "linear_attention")


@final
@dataclass(frozen=True)
class CollapsingTokens(EachStreamCheck):
    """All tokens of the residual stream become one direction with depth.

    ## What it measures

    The spread of the tokens, 1 − the mean cosine between two different tokens of one sample, after the first and
    after the last write of a stream that attention writes to. Found where little is left at the end, and most of what
    was there at the start is gone: inputs whose tokens are alike from the start are no finding.

    ## Why it matters

    Attention averages tokens; without strong enough skips, or with writes that are the same for all tokens (a large
    bias), the stream loses what tells tokens apart, at a rate that is exponential in depth. What the next layers see
    is then the same everywhere, and gradients of queries and keys vanish.

    ## What to do

    Look at what makes the writes alike: biases of the writers, skips that are scaled down, attention that is uniform
    at the start of a deep post-norm stack. Scale the writers by depth.

    ## When to ignore it

    In a trained model, where it is a note: a few large channels that all tokens share give cosines near one, while
    the other channels still tell tokens apart (NP303).

    ## References

    Dong et al. 2021 (Attention is not all you need), sec. 2; Noci et al. 2022 (Signal Propagation in Transformers),
    abstract (rank collapse and vanishing gradients); Timkey & van Schijndel 2021 (All Bark and No Bite), abstract
    (channels that dominate cosines).
    """

    code, name, severity, since = "NP308", "collapsing-tokens", Severity.WARNING, "0.1.0"
    needs = Needs.STRUCTURE | Needs.FORWARD

    least_spread: float = limit(
        0.01,
        unit=Unit.RATIO,
        source="choice: a mean cosine of 0.99; sound streams with attention end at 0.95 at most "
        "(docs/calibration.md#signal)",
    )
    least_kept: float = limit(
        0.1, unit=Unit.RATIO, source="choice: a tenth of the spread at the start, so that alike inputs are no finding"
    )

    def judge(self, seen: Measured) -> Outcome:
        """Yield one finding where the tokens of a stream collapse."""
        states = [state for state in seen.states if state.finite]
        if not any(kind in state.kind.split("+") for state in states for kind in _MIXING):
            return
        first, last = 1 - seen.measure.entry_cosine, 1 - states[-1].token_cosine
        if math.isnan(first) or math.isnan(last):
            why = "the samples have one token" if math.isnan(last) else "the trunk before the first write was not seen"
            yield self.skip(why, [seen.measure.stream])
        elif first > 0 and self.exceeds(last, least=min(self.least_spread, self.least_kept * first)):
            yield self.finding(
                states[-1].path,
                f"the mean cosine between two tokens rises from {number(1 - first)} before the first write to "
                f"{number(1 - last)} after the last of {len(states)}: tokens are told apart by "
                f"{number(last / first)} of the spread they had",
                value=last,
                against="least_spread",
                severity=unless_trained(seen, self.severity),
            )
