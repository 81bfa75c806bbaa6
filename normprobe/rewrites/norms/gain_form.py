"""Store gains as they act, or less 1."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Literal, final

import torch
from torch import nn

from normprobe.errors import RewriteError
from normprobe.records import Anatomy, NormSite
from normprobe.rewrites.base import ChosenRewrite, Effect, Refusal, Site, Sites, Survey, module_at
from normprobe.rewrites.edits import bytes_of, chosen, set_values
from normprobe.rewrites.norms.computed import Form, compute, form_of

Stored = Literal["weight", "one_plus_weight"]


@dataclass(frozen=True)
class _Detail:
    form: Form
    add: float  # to the stored gain; 0 where another norm of the same gain has done it


@final
@dataclass(frozen=True)
class StoreGains(ChosenRewrite):
    """Norms that multiply by 1 + w multiply by w, and w becomes 1 + w; or the other way.

    Exact but for rounding of the stored values: near 1 a half-precision gain has steps of 2⁻⁷ (bfloat16) where 1 + w
    keeps w with the same number of digits, so that in bfloat16 most trained gains cannot be stored plainly, and the
    proof refuses. Weight decay pulls a plain gain to 0, and 1 + w to 1.

    Attributes:
        stored: "weight" for plain gains, "one_plus_weight" for gains less 1, as Gemma has them.
        only: a pattern of paths of norms, or several; None for all.
    """

    usual = Effect.EXACT
    stored: Stored = "weight"

    def describe(self) -> str:
        """What it does, in one line."""
        return "gains are stored as they act" if self.stored == "weight" else "gains are stored less 1"

    def sites(self, survey: Survey) -> Sites:
        """One site for every norm that stores its gain the other way."""
        sites: list[Site] = []
        refused: list[Refusal] = []
        tensors: set[int] = set()
        for norm in survey.anatomy.norms:
            if norm.weight is None or not chosen(norm.path, self.only) or not self._other(norm):
                continue
            form = form_of(survey, norm)
            if isinstance(form, str):
                refused.append(Refusal(norm.path, form))
                continue
            gain = survey.model.get_parameter(norm.weight)
            sites.append(self._site(survey, norm, form, id(gain) in tensors))
            tensors.add(id(gain))
        return Sites(tuple(sites), tuple(refused))

    def _other(self, norm: NormSite) -> bool:
        plain, less = norm.affine.startswith("weight"), norm.affine.startswith("one_plus")
        return norm.executed and (less if self.stored == "weight" else plain)

    def _site(self, survey: Survey, norm: NormSite, form: Form, done: bool) -> Site:
        one_plus = self.stored == "one_plus_weight"
        add = 0.0 if done else -1.0 if one_plus else 1.0
        touched = () if done or norm.weight is None else (norm.weight,)
        detail = _Detail(replace(form, one_plus=one_plus), add)
        change = "multiplies by 1 + w in place of w" if one_plus else "multiplies by w in place of 1 + w"
        return Site(norm.path, change, touched, undo_bytes=bytes_of(survey.model, touched), detail=detail)

    def change(self, model: nn.Module, site: Site, undo: ExitStack) -> None:
        """Move the gain, and lay the form that reads it so over the norm."""
        detail: _Detail = site.detail
        for name in site.touched:
            gain = model.get_parameter(name)
            set_values(gain, gain.detach().to(torch.promote_types(gain.dtype, torch.float32)) + detail.add, undo)
        compute(module_at(model, site.path), detail.form, site.path)

    def confirm(self, sites: tuple[Site, ...], anatomy: Anatomy) -> None:
        """Check that every norm reads as storing its gain so."""
        for site in sites:
            norm = anatomy.norm(site.path)
            if norm is None or not norm.affine.startswith(self.stored):
                found = "no norm" if norm is None else norm.affine
                raise RewriteError(f"StoreGains did not take hold at {site.path}", expected=self.stored, found=found)
