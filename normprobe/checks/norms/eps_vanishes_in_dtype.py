"""NP102."""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

from normprobe.checks.base import number
from normprobe.checks.norms.each_norm import EachNormCheck, seen_by
from normprobe.records import Finding, Fix, NormSite, ReportData, Severity
from normprobe.theory import Format

_GUARDED = frozenset({"layernorm", "rmsnorm", "batchnorm", "groupnorm", "instancenorm"})  # what has an eps by custom


@final
@dataclass(frozen=True)
class EpsVanishesInDtype(EachNormCheck):
    """An eps is too small for the dtype in which the norm uses it.

    ## What it measures

    Eps against the smallest positive number of the dtype in which it is added, which follows from the dtype of
    the norm's input in the recorded forward (autocast and mixed weights included). A norm that computes its
    statistic in the dtype of its input adds eps there; so does one whose fused reduction returns that dtype
    and is clamped afterwards, as torch.nn.functional.normalize does. A norm that reduces in float32 with eps
    inside the root uses eps in float32 and never loses it.

    And, as a warning in every dtype, norms that divide by a statistic without any eps, where one is customary: a
    copy that is given a row of zeros returns NaN.

    ## Why it matters

    With eps gone, a row of zeros (a padded position, a dead channel) is divided by zero: NaN, which attention
    then spreads. 1e-12, customary in BERT-like models, is zero in float16. An error, because no other guard
    is left.

    ## What to do

    Take the statistic in float32 (`UpcastNorms`), or give a float16 norm an eps of at least 6e-8, better
    1e-5. bfloat16 has the range of float32 and keeps every customary eps. An eps of 0 is often a field that was
    read as an integer, or a default that was never set.

    ## When to ignore it

    When no row can be zero or constant, which padding alone makes unlikely.

    ## References

    IEEE 754-2019, binary16: the smallest positive number is 2⁻²⁴ = 5.96e-8; up to half of it rounds to zero.
    """

    code, name, severity, since = "NP102", "eps-vanishes-in-dtype", Severity.ERROR, "0.1.0"
    fixes = (Fix(rewrite="UpcastNorms"),)

    def judge(self, norm: NormSite, data: ReportData) -> Finding | str | None:
        """One finding where eps is 0 in the dtype that the norm uses it in."""
        if norm.frozen or norm.kind in ("dyt", "affine", "identity"):
            return None
        if norm.eps_placement == "none":
            return self._without(norm) if norm.executed and norm.kind in _GUARDED else None
        seen = seen_by(norm, data)
        if seen.form is None:
            return f"the dtype of its input, {seen.text!r}, is not one whose range is known"
        vanishes = self._vanishes(norm, seen.form)
        if vanishes is None:
            return f"could not tell eps, or whether it is used in {seen.form.name}"
        return self._found(norm, seen.form, seen.sure) if vanishes else None

    def _without(self, norm: NormSite) -> Finding:
        found = self.finding(
            norm.path,
            "no eps is in force, or one of 0: a row of zeros gives NaN",
            value=0.0,
            source="0/0 in every dtype",
            severity=Severity.WARNING,
            about="no eps",
        )
        return found.model_copy(update={"fix": None, "fixes": ()})

    def _vanishes(self, norm: NormSite, form: Format) -> bool | None:
        """Whether eps is lost, for an input in `form`; None where that cannot be told."""
        if norm.eps is None:
            return None
        if norm.reduction == "float32" or not self.exceeds(norm.eps, least=form.smallest_subnormal):
            return False
        if norm.reduction == "native":
            return None if norm.eps_placement == "unknown" else norm.eps_placement != "inside_sqrt"
        return True if norm.reduction == "input" else None

    def _found(self, norm: NormSite, form: Format, sure: bool) -> Finding:
        eps = norm.eps or 0.0
        rounded = "0" if form.vanishes(eps) else number(form.smallest_subnormal)
        where = "where this norm uses it" if sure else "one of the model's dtypes; that of its input was not recorded"
        return self.finding(
            norm.path,
            f"eps {number(eps)} becomes {rounded} in {form.name}, {where}: "
            f"a row of zeros is not guarded; it needs at least {number(form.smallest_subnormal)} or float32",
            value=norm.eps,
            bound=form.smallest_subnormal,
            source=form.source,
        )
