"""Take norms away that never run, or that norm what another norm has just normed."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass
from typing import final

from torch import Tensor, nn

from normprobe.errors import RewriteError
from normprobe.records import Anatomy, NormSite
from normprobe.rewrites.base import ChosenRewrite, Effect, Refusal, Site, Sites, Survey, module_at
from normprobe.rewrites.edits import bytes_of, chosen, set_values
from normprobe.rewrites.norms.computed import Form, acting, form_of
from normprobe.rewrites.norms.shared import why_shared
from normprobe.rewrites.stand_in import goes, take_out


@dataclass(frozen=True)
class _Doubled:
    first: str
    before: Form
    behind: Form


@final
@dataclass(frozen=True)
class RemoveNorms(ChosenRewrite):
    """Norms that never run go, and a norm that reads another norm's output goes into that one.

    A norm that does not run is set to None in its parent, so that its parameters leave the state dict and code that
    calls it all the same says so; that is exact. Of two norms in a row a module that passes its input on stands where
    the second was; its gain and offset go into those of the first, by the mean and the size that these give to the
    second's input where the first's output is white: exact but for eps where the first has one gain for all features
    and no offset, and called calibrated.

    Attributes:
        only: a pattern of paths of norms, or several; None for all.
    """

    usual = Effect.CALIBRATED
    mildest = Effect.EXACT

    def effect_at(self, sites: tuple[Site, ...]) -> Effect:
        """Exact where no norm goes that runs."""
        return Effect.CALIBRATED if any(site.detail is not None for site in sites) else Effect.EXACT

    def describe(self) -> str:
        """What it does, in one line."""
        return "norms that never run go; a second norm in a row goes into the first"

    def sites(self, survey: Survey) -> Sites:
        """One site for every such norm."""
        found = [_site(survey, norm) for norm in survey.anatomy.norms if chosen(norm.path, self.only)]
        return Sites.of(found)

    def change(self, model: nn.Module, site: Site, undo: ExitStack) -> None:
        """Merge gain and offset where there are two norms, and take the module out."""
        doubled: _Doubled | None = site.detail
        if doubled is not None:
            _merge(module_at(model, doubled.first), module_at(model, site.path), doubled, undo)
        take_out(model, site.path)
        if doubled is None:
            parent, _, own = site.path.rpartition(".")
            module_at(model, parent or ".")._modules[own] = None

    def confirm(self, sites: tuple[Site, ...], anatomy: Anatomy) -> None:
        """Check that none of the norms is left."""
        for site in sites:
            norm = anatomy.norm(site.path)
            if norm is not None and norm.kind != "identity":
                what = f"RemoveNorms did not take hold at {site.path}"
                raise RewriteError(what, expected="no norm", found=norm.kind)


def _site(survey: Survey, norm: NormSite) -> Site | Refusal | None:
    if not norm.module or norm.path == ".":
        return None
    if not norm.executed:
        if norm.idle_beside:
            return Refusal(norm.path, f"{norm.idle_beside[0]} beside it did not run either: a part that is optional")
        gone, size = goes(survey.model, norm.path)
        return Site(norm.path, f"the {norm.kind} never runs and goes", gone=gone, undo_bytes=size)
    first = survey.anatomy.norm(norm.follows or "")
    return None if first is None else _second(survey, first, norm)


def _second(survey: Survey, first: NormSite, norm: NormSite) -> Site | Refusal:
    before, behind = form_of(survey, first), form_of(survey, norm)
    if isinstance(before, str):
        return Refusal(norm.path, f"{first.path}, which it would go into, stays: {before}")
    if isinstance(behind, str):
        return Refusal(norm.path, behind)
    if before.kind != behind.kind or first.size != norm.size or norm.executions != first.executions:
        return Refusal(norm.path, f"it is no second norm of the kind and size of {first.path}")
    names = tuple(name for name in (first.weight, first.bias) if name is not None)
    if (behind.weight and not before.weight) or (behind.bias and not before.bias):
        return Refusal(norm.path, f"{first.path} has no gain or no offset that its own could go into")
    if (why := why_shared(survey, first)) is not None:
        return Refusal(norm.path, f"{first.path}, which it would go into, stays: {why}")
    change = f"the second {norm.kind} in a row goes into {first.path}"
    doubled = _Doubled(first.path, before, behind)
    gone, size = goes(survey.model, norm.path)
    held = size + bytes_of(survey.model, names)
    return Site(norm.path, change, names, gone=gone, undo_bytes=held, detail=doubled)


def _merge(first: nn.Module, second: nn.Module, doubled: _Doubled, undo: ExitStack) -> None:
    """g₁' = g₁ g₂ / s and b₁' = (b₁ − mean b₁) g₂ / s + b₂, with s² = mean(g₁²) + mean of b₁² (its variance for a
    LayerNorm): what the second norm divides by where the first's normed elements are uncorrelated."""
    gain, offset = acting(first, doubled.before)
    more, shift = acting(second, doubled.behind)
    spread = offset - offset.mean() if doubled.behind.kind == "layernorm" else offset
    size = (gain.square().mean() + spread.square().mean()).sqrt()
    if not float(size) > 0:
        what = f"RemoveNorms cannot merge into {doubled.first}"
        raise RewriteError(what, expected="a gain that is not 0 everywhere", found="0")
    _store(first, doubled.before.weight, gain * more / size - float(doubled.before.one_plus), undo)
    _store(first, doubled.before.bias, spread * more / size + shift, undo)


def _store(module: nn.Module, name: str | None, values: Tensor, undo: ExitStack) -> None:
    if name is not None:
        parameter = module.get_parameter(name)
        set_values(parameter, values.expand(parameter.shape), undo)
