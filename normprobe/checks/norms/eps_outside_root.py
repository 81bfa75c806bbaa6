"""NP101."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import final

from normprobe.checks.base import Unit, limit, number
from normprobe.checks.norms.each_norm import EachNormCheck
from normprobe.records import Finding, Fix, NormSite, ReportData, Severity

ROOTED = frozenset({"layernorm", "rmsnorm", "batchnorm", "groupnorm", "instancenorm"})
_SMALL = 1e-2  # an RMS below which activations seldom are


@final
@dataclass(frozen=True)
class EpsOutsideRoot(EachNormCheck):
    """A norm adds its eps elsewhere than to the mean square inside the root.

    ## What it measures

    The place of eps, found by shrinking the input of a copy of the norm and watching where its output stops
    being normalised. A layer, RMS, batch, group or instance norm divides by √(v + eps). Found instead: √v +
    eps (`outside_sqrt`), max(√v, eps) (`clamp`), or an eps that is multiplied by the row's squared peak
    (`scaled`). The value is eps itself. A clamp of v inside the root is a note: √max(v, eps) is at most √2 away
    from √(v + eps). An eps so small that both places give the same float32 numbers at any
    RMS that activations have is none.

    ## Why it matters

    The same number means another thing. Inside the root, eps = 1e-5 takes over below an RMS of 3e-3; outside
    it does so below 1e-5. For ordinary activations the two agree to a fraction of a percent, and the model is
    not wrong. But fused kernels, other frameworks and converted checkpoints have eps inside the root, so a
    port that copies the number changes the output wherever the input is small: right after the embedding, or
    at padded positions. With `scaled`, rows with one large channel differ, and a row of zeros becomes NaN.

    A warning and never an error, because the model itself was trained with what it has.

    ## What to do

    For a new model, move eps inside the root (`SetEps`). For a trained one, keep it and say so in the model's
    documentation, and compare any port at small inputs and with a row of zeros.

    ## When to ignore it

    When the model is never ported or fused. L2 norms on queries and keys, ScaleNorm and GRN are not judged:
    for them eps outside the root, or a clamp, is the published form.

    ## References

    Ba et al. 2016 (LayerNorm), Ioffe & Szegedy 2015 (algorithm 1, eps inside the root), Zhang & Sennrich 2019
    (RMSNorm); the documentation of torch.nn.LayerNorm and torch.nn.RMSNorm.
    """

    code, name, severity, since = "NP101", "eps-outside-root", Severity.WARNING, "0.1.0"
    fixes = (Fix(rewrite="SetEps", at_places=True),)

    rounding: float = limit(
        2.0**-24,
        unit=Unit.RATIO,
        source="IEEE 754-2019, binary32: half a unit in the last place; taken at an RMS of 0.01, a choice: half that "
        "of embeddings drawn with standard deviation 0.02",
    )

    def judge(self, norm: NormSite, data: ReportData) -> Finding | str | None:
        """One finding where eps was found elsewhere than inside the root."""
        if norm.eps_placement == "unknown" or norm.kind == "unknown":
            return "the place of eps could not be told"
        if norm.kind not in ROOTED or norm.eps_placement not in ("outside_sqrt", "clamp", "scaled"):
            return None
        if norm.eps_placement != "scaled" and norm.eps is not None and self._nil(norm):
            return None
        return self.finding(
            norm.path,
            self._message(norm),
            value=norm.eps,
            source="Ioffe & Szegedy 2015, algorithm 1; torch.nn.RMSNorm",
            severity=Severity.NOTE if _clamps_square(norm) else None,
            fixes=_squared(norm) if _clamps_square(norm) else None,
        )

    def _nil(self, norm: NormSite) -> bool:
        """Whether eps does nothing to any realistic activation, wherever it is added."""
        eps = norm.eps or 0.0
        return eps > 0 and not self.exceeds(abs(_factor(norm, eps, _SMALL) - 1), self.rounding)

    @staticmethod
    def _message(norm: NormSite) -> str:
        eps = "eps" if norm.eps is None else f"eps {number(norm.eps)}"
        if norm.eps_placement == "scaled":
            return f"{eps} is multiplied by the row's squared peak: another output for rows with a large channel"
        if _clamps_square(norm) and norm.eps:
            return (
                f"keeps the mean square v above {norm.eps**2:.3g} instead of adding it, √max(v, eps): "
                f"a port that adds it differs by up to a factor of 1.414, at an input RMS of {number(norm.eps)}"
            )
        form = "√v + eps" if norm.eps_placement == "outside_sqrt" else "max(√v, eps)"
        text = f"divides by {form} instead of √(v + eps)"
        if norm.eps is None or not norm.eps > 0:
            return text
        rms = math.sqrt(norm.eps)
        return (
            f"{text}: with {eps}, a port with eps inside the root differs by a factor of "
            f"{number(_factor(norm, norm.eps, rms))} at an input RMS of {number(rms)}"
        )


def _squared(norm: NormSite) -> tuple[Fix, ...]:
    """Adds inside the root what the mean square is kept above; `eps` of the norm is its root."""
    if not norm.eps:
        return ()
    return (Fix(rewrite="SetEps", settings={"eps": float(f"{norm.eps**2:.4g}")}, at_places=True),)


def _clamps_square(norm: NormSite) -> bool:
    """Whether the bound may be one of the mean square, inside the root: it is one of the root if the code says so."""
    return norm.eps_placement == "clamp" and norm.eps_clamps != "root"


def _factor(norm: NormSite, eps: float, rms: float) -> float:
    """By how much outputs change where eps, as it is written, moves into the root."""
    if norm.eps_placement == "outside_sqrt":
        return math.sqrt(rms**2 + eps) / (rms + eps)
    added = eps**2 if _clamps_square(norm) else eps
    return math.sqrt(rms**2 + added) / max(rms, eps)
