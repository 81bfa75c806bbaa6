"""NP106."""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

from normprobe.checks.norms.each_norm import EachNormCheck, Seen, seen_by
from normprobe.records import Finding, Fix, NormSite, ReportData, Severity
from normprobe.theory import BFLOAT16, FLOAT16, Format

WITHOUT_STATISTIC = frozenset({"dyt", "affine", "identity"})


@final
@dataclass(frozen=True)
class HalfPrecisionReduction(EachNormCheck):
    """A norm takes its statistic in the dtype of its input instead of float32.

    ## What it measures

    The dtype in which squares are summed, found by feeding a copy of the norm half-precision rows whose
    squares overflow in half precision and not in float32. "input" is a finding; a fused kernel ("native")
    accumulates in float32 and is none.

    ## Why it matters

    In float16 the square of anything from 256 on is infinite, so one large channel turns the whole row into
    zeros: an error where the norm's input is float16 in the recorded forward. In bfloat16 nothing overflows,
    but the statistic keeps 8 bits: up to 0.4 % of every row's scale, at every norm; a warning. A norm that gets
    float32 is right today, and would have one of the two faults as soon as the model is cast: a note.

    ## What to do

    Cast to float32 before the squares and back after the division (`UpcastNorms`, where the norm is a module
    of its own without running statistics), or use a fused norm
    (torch.nn.LayerNorm, torch.nn.RMSNorm).

    ## When to ignore it

    When the model only ever runs in float32, or under an autocast that takes powers and norms in float32.

    ## References

    IEEE 754-2019, binary16: the largest finite number is 65504 = 255.9². Micikevicius et al. 2018 (Mixed
    Precision Training), sec. 3.3: reductions, those of normalisation among them, are done in float32.
    """

    code, name, severity, since = "NP106", "half-precision-reduction", Severity.ERROR, "0.1.0"
    fixes = (Fix(rewrite="UpcastNorms"),)

    def judge(self, norm: NormSite, data: ReportData) -> Finding | str | None:
        """One finding where the norm reduces in the dtype of its input."""
        if norm.kind in WITHOUT_STATISTIC or norm.frozen:
            return None
        if norm.reduction == "unknown":
            return "the dtype of the reduction could not be told"
        if norm.reduction != "input":
            return None
        seen = seen_by(norm, data)
        found = self.finding(
            norm.path,
            _consequence(seen),
            value=norm.reduction,
            source="Micikevicius et al. 2018, sec. 3.3",
            severity=_severity(seen.form),
        )
        mendable = norm.module and not norm.batch_dependent  # there is a module whose forward can be wrapped
        return found if mendable else found.model_copy(update={"fix": None, "fixes": ()})


def _severity(form: Format | None) -> Severity:
    if form is FLOAT16:
        return Severity.ERROR
    return Severity.WARNING if form is BFLOAT16 else Severity.NOTE


def _consequence(seen: Seen) -> str:
    if seen.form is FLOAT16 and seen.sure:
        return "sums squares in float16: they overflow from |x| = 256 on, and the whole row becomes 0"
    if seen.form is BFLOAT16 and seen.sure:
        return "sums squares in bfloat16: the row's scale keeps 8 bits, an error of up to 0.4 %"
    now = f"{seen.text or 'unknown'} now" if seen.sure else f"one of {seen.text} (not recorded)"
    return (
        f"sums squares in the dtype of its input, {now}: "
        "float16 would overflow from |x| = 256 on, bfloat16 would keep 8 bits"
    )
