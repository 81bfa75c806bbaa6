"""LayerNorm to RMSNorm: exactly, by keeping the stream's mean at zero, or as a plain swap."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import final

import torch
from torch import nn

from normprobe.errors import RewriteError
from normprobe.records import Anatomy, Stream
from normprobe.rewrites.at_boundary import lay_at
from normprobe.rewrites.base import Effect, Refusal, Rewrite, Site, Sites, Survey, module_at
from normprobe.rewrites.boundary import Boundaries
from normprobe.rewrites.edits import set_values
from normprobe.rewrites.norms.computed import Form, Uncentred, compute, form_of
from normprobe.rewrites.norms.to_rmsnorm.behind import uncentred
from normprobe.rewrites.norms.to_rmsnorm.dropout import dropout_note
from normprobe.rewrites.norms.to_rmsnorm.entry import Centred, Tied, Untied, centred_site, entry_sites, untie
from normprobe.rewrites.norms.to_rmsnorm.fitness import subtracting, why_not
from normprobe.rewrites.norms.to_rmsnorm.layers import CentredInput, CentredOutput
from normprobe.rewrites.swap import why_not as class_stays


@final
@dataclass(frozen=True)
class ToRMSNorm(Rewrite):
    """Every LayerNorm that reads a residual stream becomes an RMSNorm with its gain, offset and eps.

    Exact: LayerNorm(x) = RMSNorm(x − mean(x)), and the mean stays 0 where the stream enters without one and nothing
    writes one (Zhang & Sennrich 2019, sec. 4; Ashkboos et al. 2024, sec. 3.1). So the mean over the features is taken
    from every weight and bias that writes, and where the stream begins: from the tables that it is the sum of, or,
    where the head shares one of these or the stream begins with something else, from the stream itself at every
    forward. Refused where something reads the stream otherwise than through such a norm, or where a write passes more
    than moves, factors for all features and sums of what is centred too. The norms reduce in float32 or wider. Dropout
    behind a writer brings a mean back: with it the function is the same in eval mode alone, and the plan says so where
    two forwards in train mode differ.

    Attributes:
        tied: what happens to a table that the head shares: "entry" leaves it and takes the mean from the stream,
            "untie" gives the head a copy of its own, which adds a parameter.
        exact: False swaps the norms alone, those on the sums of post-norm streams too, which changes what the model
            computes by what the means were.
    """

    TOGETHER = True
    exact: bool = True
    tied: Tied = "entry"

    @property
    def effect(self) -> Effect:
        """Exact, or breaking for the plain swap."""
        return Effect.EXACT if self.exact else Effect.BREAKING

    def describe(self) -> str:
        """What it does, in one line."""
        how = "takes the mean from writers and entry once" if self.exact else "leaves the mean out of the norms alone"
        return f"LayerNorms that read a residual stream become RMSNorms; {how}"

    def sites(self, survey: Survey) -> Sites:
        """The norms, and where it is exact the writers and the entry, of every stream that they suit."""
        sites: dict[tuple[str, ...], Site] = {}
        refused = []
        boundaries = Boundaries(survey)
        for stream in survey.anatomy.streams:
            found = self._stream(survey, boundaries, stream)
            if isinstance(found, str):
                refused.append(Refusal(stream.name, found))
            else:
                sites |= {site.claims: site for site in found}
        note = dropout_note(survey) if sites and self.exact else None
        return Sites(tuple(sites.values()), tuple(refused), () if note is None else (note,))

    def _stream(self, survey: Survey, boundaries: Boundaries, stream: Stream) -> list[Site] | str:
        why = why_not(survey.anatomy, stream) if self.exact else None
        norms = [n for n in subtracting(survey.anatomy, stream, sums=not self.exact) if n.subtracts_mean]
        if why is None and not norms:
            why = "none of the norms that read it subtracts the mean"
        forms = {norm.path: form_of(survey, norm) for norm in norms}
        stays = (f"{path} cannot be changed: {form}" for path, form in forms.items() if isinstance(form, str))
        why = why or next(stays, None) or (uncentred(boundaries, stream) if self.exact else None)
        if why is not None:
            return why
        sites = [_norm_site(path, form) for path, form in forms.items() if isinstance(form, Form)]
        if not self.exact:
            return sites
        entry = entry_sites(survey, boundaries, stream, self.tied)
        return entry if isinstance(entry, str) else [*sites, *entry, *_writers(survey, stream)]

    def change(self, model: nn.Module, site: Site, undo: ExitStack) -> None:
        """Lay a layer over a norm or the entry, or centre a writer in place."""
        module = module_at(model, site.path)
        if isinstance(site.detail, Centred):
            _centre(model.get_parameter(site.touched[0]), site.detail.axis, undo)
            return
        if isinstance(site.detail, Untied):
            untie(model, module, site.detail.name, undo)
            return
        if isinstance(site.detail, Form):
            compute(module, site.detail, site.path, Uncentred)
            return
        if (why := class_stays(module)) is not None:
            raise RewriteError(f"ToRMSNorm cannot change {site.path}", expected="the module as planned", found=why)
        lay_at(site.detail, (CentredInput, CentredOutput), module)

    def confirm(self, sites: tuple[Site, ...], anatomy: Anatomy) -> None:
        """Check that every norm reads as an RMSNorm."""
        for site in sites:
            norm = anatomy.norm(site.path)
            if isinstance(site.detail, Form) and (norm is None or norm.kind != "rmsnorm"):
                found = "no norm" if norm is None else norm.kind
                raise RewriteError(f"ToRMSNorm did not take hold at {site.path}", expected="rmsnorm", found=found)


def _norm_site(path: str, form: Form) -> Site:
    rms = replace(form, kind="rmsnorm", after_cast=False)
    return Site(path, f"layernorm becomes rmsnorm, eps {form.eps:.4g}", detail=rms)


def _writers(survey: Survey, stream: Stream) -> Iterator[Site]:
    """Each weight and bias that writes to the stream, once."""
    axes = {site.parameter: site.output_axis for site in survey.anatomy.weights}
    for name in dict.fromkeys(name for branch in stream.branches for name in branch.writers):
        yield centred_site(survey, name, axes.get(name, survey.model.get_parameter(name).dim() - 1))


def _centre(parameter: torch.Tensor, axis: int, undo: ExitStack) -> None:
    wide = parameter.detach().to(torch.promote_types(parameter.dtype, torch.float64))
    set_values(parameter, wide - wide.mean(axis, keepdim=True), undo)
