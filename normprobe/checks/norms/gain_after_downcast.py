"""NP107."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import final

from normprobe.checks.norms.each_norm import EachNormCheck, seen_by
from normprobe.records import Elements, Finding, NormSite, ReportData, Severity
from normprobe.theory import BFLOAT16, FLOAT16


@final
@dataclass(frozen=True)
class GainAfterDowncast(EachNormCheck):
    """A norm rounds to half precision before it multiplies by its gain.

    ## What it measures

    The order of cast and gain, found by feeding a copy of the norm with random gains in half precision and
    comparing its output with both orders, where the norm's input is bfloat16 or float16 in the recorded
    forward. A gain whose elements are all the same power of two loses nothing and is passed.

    ## Why it matters

    The output is rounded twice, once before the product and once behind it, so that its relative error is up
    to one unit in the last place in place of a half. The model was trained that way and is right as it is; but
    about a quarter of the numbers differ from those of a norm that multiplies in float32, so that a port or a
    fused kernel with the other order does not give the same output.

    ## What to do

    In a port, keep the order. In a new model multiply in float32 and cast last, as torch.nn.RMSNorm's kernels
    do.

    ## When to ignore it

    When nothing is ported or compared bit by bit. Llama and its kin multiply after the cast, Gemma before it.

    ## References

    IEEE 754-2019, sec. 4.3.1 (one rounding is at most half a unit in the last place).
    """

    code, name, severity, since = "NP107", "gain-after-downcast", Severity.NOTE, "0.1.0"

    def judge(self, norm: NormSite, data: ReportData) -> Finding | str | None:
        """One note where the gain is multiplied in half precision."""
        seen = seen_by(norm, data)
        if seen.form not in (FLOAT16, BFLOAT16) or not seen.sure or norm.affine == "none" or norm.frozen:
            return None
        if norm.weight_multiply == "unknown":
            return "the order of cast and gain could not be told"
        gain = next((held.gain for held in data.measurements.norm_gains if held.path == norm.path), None)
        if norm.weight_multiply != "after_cast" or (gain is not None and _exact(gain)):
            return None
        return self.finding(
            norm.path,
            f"rounds to {seen.form.name} before it multiplies by its gain, and again behind: a relative error of up to "
            f"{seen.form.epsilon:.2g}, twice that of one rounding",
            value=seen.form.epsilon,
            bound=seen.form.epsilon / 2,
            source=seen.form.source,
        )


def _exact(gain: Elements) -> bool:
    """Whether a product with this gain needs no rounding: every element is one power of two."""
    return gain.constant is not None and math.frexp(abs(gain.constant))[0] == 0.5
