"""NP102."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, final

from normprobe.checks.base import Check, Outcome, number
from normprobe.records import Finding, NormSite, ReportData, Severity
from normprobe.theory import Format, format_of


@final
@dataclass(frozen=True)
class EpsVanishesInDtype(Check):
    """An eps is too small for the dtype in which the norm uses it.

    ## What it measures

    Eps against the smallest positive number of the dtype in which it is added. A norm that computes its
    statistic in the dtype of its input adds eps there; so does one whose fused reduction returns that dtype
    and is clamped afterwards, as torch.nn.functional.normalize does. A norm that reduces in float32 with eps
    inside the root uses eps in float32 and never loses it.

    ## Why it matters

    With eps gone, a row of zeros (a padded position, a dead channel) is divided by zero: NaN, which attention
    then spreads. 1e-12, customary in BERT-like models, is zero in float16. An error, because no other guard
    is left.

    ## What to do

    Take the statistic in float32 (`UpcastNorms`), or give a float16 norm an eps of at least 6e-8, better
    1e-5. bfloat16 has the range of float32 and keeps every customary eps.

    ## When to ignore it

    When no row can be zero or constant, which padding alone makes unlikely.

    ## References

    IEEE 754-2019, binary16: the smallest positive number is 2⁻²⁴ = 5.96e-8; up to half of it rounds to zero.
    """

    code, name, severity, since = "NP102", "eps-vanishes-in-dtype", Severity.ERROR, "0.1.0"
    fix = "UpcastNorms"

    def check(self, data: ReportData) -> Outcome:
        """Yield one finding for every norm whose eps is 0 in the dtype that it is used in."""
        form = format_of(data.target.dtype)
        if not data.anatomy.norms:
            yield self.skip("no norm was found")
            return
        if form is None:
            yield self.skip(f"the model's dtype {data.target.dtype!r} is not one whose range is known")
            return
        unknown = []
        for norm in data.anatomy.norms:
            verdict = self._vanishes(norm, form)
            if verdict == "unknown":
                unknown.append(norm.path)
            elif verdict:
                yield self._found(norm, form)
        if unknown:
            yield self.skip(f"could not tell eps, or whether it is used in {form.name}", unknown)

    def _vanishes(self, norm: NormSite, form: Format) -> bool | Literal["unknown"]:
        """Whether eps is lost, for a model in `form`."""
        if norm.frozen or norm.kind in ("dyt", "affine", "identity") or norm.eps_placement == "none":
            return False
        if norm.eps is None:
            return "unknown"
        if norm.reduction == "float32" or not self.exceeds(norm.eps, least=form.smallest_subnormal):
            return False
        if norm.reduction == "native":
            return "unknown" if norm.eps_placement == "unknown" else norm.eps_placement != "inside_sqrt"
        return True if norm.reduction == "input" else "unknown"

    def _found(self, norm: NormSite, form: Format) -> Finding:
        eps = norm.eps or 0.0
        rounded = "0" if form.vanishes(eps) else number(form.smallest_subnormal)
        return self.finding(
            norm.path,
            f"eps {number(eps)} becomes {rounded} in {form.name}, where this norm uses it: "
            f"a row of zeros is not guarded; it needs at least {number(form.smallest_subnormal)} or float32",
            value=norm.eps,
            bound=form.smallest_subnormal,
            source=form.source,
        )
