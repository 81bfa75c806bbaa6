"""Let torch's fused operations compute norms that are written out operation by operation."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import final

from torch import nn

from normprobe.errors import RewriteError
from normprobe.records import Anatomy, NormSite
from normprobe.rewrites.base import ChosenRewrite, Effect, Refusal, Site, Sites, Survey, module_at
from normprobe.rewrites.edits import chosen
from normprobe.rewrites.norms.computed import compute, form_of

_WIDE = ("float32", "float64")


@final
@dataclass(frozen=True)
class FuseNorms(ChosenRewrite):
    """LayerNorms and RMSNorms that a module writes out are computed by `torch.nn.functional`'s fused operation.

    Exact: the same statistic, eps, gain and offset, and the same order of gain and cast; on a GPU one read of the input
    and one write in place of four to seven. On a CPU torch itself runs an RMS norm in several operations. A norm that
    takes its statistic in half precision would compute something else and is refused: `UpcastNorms` mends that.

    Attributes:
        only: a pattern of paths of norms, or several; None for all.
    """

    usual = Effect.EXACT

    def describe(self) -> str:
        """What it does, in one line."""
        return "norms that are written out in several operations are computed by torch's fused one"

    def sites(self, survey: Survey) -> Sites:
        """One site for every norm that is a module and is not fused."""
        norms = [norm for norm in survey.anatomy.norms if chosen(norm.path, self.only) and _written_out(norm)]
        found = [self._site(survey, norm) for norm in norms]
        return Sites.of(found)

    def _site(self, survey: Survey, norm: NormSite) -> Site | Refusal:
        form = form_of(survey, norm)
        if isinstance(form, str):
            return Refusal(norm.path, form)
        if norm.dtype not in _WIDE and norm.reduction != "float32":
            return Refusal(norm.path, f"it reduces in {norm.dtype}, the fused operation in float32: see UpcastNorms")
        change = f"{norm.kind} of {norm.class_name} becomes torch's fused {form.kind}"
        return Site(norm.path, change, detail=replace(form, fused=True))

    def change(self, model: nn.Module, site: Site, undo: ExitStack) -> None:
        """Lay the fused form over the norm."""
        compute(module_at(model, site.path), site.detail, site.path)

    def confirm(self, sites: tuple[Site, ...], anatomy: Anatomy) -> None:
        """Check that every norm reads as the same kind, a LayerNorm as fused."""
        for site in sites:
            norm = anatomy.norm(site.path)
            if norm is None or norm.kind != site.detail.kind or (norm.kind == "layernorm" and not norm.fused):
                found = "no norm" if norm is None else f"a {norm.kind} in several operations"
                raise RewriteError(
                    f"FuseNorms did not take hold at {site.path}", expected=f"a fused {site.detail.kind}", found=found
                )


def _written_out(norm: NormSite) -> bool:
    return norm.executed and not norm.fused and norm.kind in ("layernorm", "rmsnorm") and not norm.batch_dependent
