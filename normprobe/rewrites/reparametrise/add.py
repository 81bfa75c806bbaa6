"""Let weights be computed from a direction and a length, or from standardised rows."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Literal, final

from torch import nn
from torch.nn.utils import parametrize

from normprobe.errors import RewriteError
from normprobe.records import Anatomy, WeightSite
from normprobe.rewrites.base import ChosenRewrite, Effect, Refusal, Site, Sites, Survey, full_name, module_at
from normprobe.rewrites.edits import bytes_of, chosen, set_values
from normprobe.rewrites.reparametrise.forms import NormedRows, StandardisedRows
from normprobe.rewrites.swap import why_not as class_stays

Kind = Literal["weight_norm", "weight_standardization"]


@dataclass(frozen=True)
class _Detail:
    own: str
    axes: tuple[int, ...]


@final
@dataclass(frozen=True)
class Reparametrise(ChosenRewrite):
    """Linear and convolution weights are computed at every forward from parameters of which the scale is one's own.

    "weight_norm", g · v / ‖v‖ for each output, is exact (Salimans & Kingma 2016). "weight_standardization" takes the
    mean over the inputs of each output off, and is breaking for weights that have one (Brock et al. 2021). The
    parameter becomes two of torch's parametrisation, `parametrizations.<name>.original0` (one number for each output)
    and `original1`, so that an optimiser has to be made anew. `PlainWeights` takes it back. torch pickles no module
    with a parametrisation: save its `state_dict()`.

    Attributes:
        kind: weight_norm | weight_standardization.
        eps: of the standardisation, inside the root.
        only: a pattern of parameter names, or several; None for all readers, writers and inner weights of branches.
    """

    kind: Kind = "weight_norm"
    eps: float = 1e-4

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 < self.eps < 1:
            raise RewriteError("Reparametrise cannot be made", expected="0 < eps < 1", found=repr(self.eps))

    @property
    def effect(self) -> Effect:
        """Exact for weight norm, breaking for standardisation."""
        return Effect.EXACT if self.kind == "weight_norm" else Effect.BREAKING

    def describe(self) -> str:
        """What it does, in one line."""
        what = "length and direction" if self.kind == "weight_norm" else "gain and standardised rows"
        return f"weights are computed from {what} at every forward"

    def places(self, survey: Survey) -> Iterator[tuple[str, ...]]:
        """The weights, tables apart."""
        return ((site.parameter,) for site in survey.anatomy.weights if site.kind != "embedding")

    def sites(self, survey: Survey) -> Sites:
        """One site for every chosen weight."""
        wanted = [site for site in survey.anatomy.weights if site.kind != "embedding" and self._meant(site)]
        found = [_site(survey, site, self.kind) for site in wanted]
        return Sites.of(found)

    def _meant(self, site: WeightSite) -> bool:
        if self.only is None:
            return not {"reader", "writer", "inner"}.isdisjoint(site.roles)
        return chosen(site.parameter, self.only)

    def change(self, model: nn.Module, site: Site, undo: ExitStack) -> None:
        """Register the parametrisation."""
        module, detail = module_at(model, site.path), site.detail
        weight = module.get_parameter(detail.own)
        set_values(weight, weight, undo)  # what training will write over: the direction stays in the same memory
        form = NormedRows(detail.axes) if self.kind == "weight_norm" else StandardisedRows(detail.axes, self.eps)
        parametrize.register_parametrization(module, detail.own, form.train(module.training))

    def confirm(self, sites: tuple[Site, ...], anatomy: Anatomy) -> None:
        """Check that every weight reads as computed so."""
        found = {each.path: each.kind for each in anatomy.reparametrizations}
        for site in sites:
            if found.get(site.path) != self.kind:
                what = f"Reparametrise did not take hold at {site.path}"
                raise RewriteError(what, expected=self.kind, found=str(found.get(site.path)))


def _site(survey: Survey, site: WeightSite, kind: Kind) -> Site | Refusal:
    path, _, own = site.parameter.rpartition(".")
    module = module_at(survey.model, path or ".") if site.parameter in dict(survey.model.named_parameters()) else None
    why = _why_not(survey, site, module, own)
    if why is not None:
        return Refusal(site.parameter, why)
    kept = {site.output_axis % len(site.shape)} | ({0} if site.kind == "experts" else set())
    axes = tuple(axis for axis in range(len(site.shape)) if axis not in kept)
    names = tuple(full_name(path or ".", f"parametrizations.{own}.original{i}") for i in range(2))
    change = f"{own} by {kind.replace('_', ' ')}"
    weight = survey.model.get_parameter(site.parameter)
    if kind == "weight_norm" and not weight.is_meta and not bool(weight.detach().square().sum(axes).all()):
        return Refusal(site.parameter, "an output of it has no weight but 0: that has no direction")
    gone, detail = (site.parameter,), _Detail(own, axes)
    return Site(path or ".", change, added=names, gone=gone, undo_bytes=bytes_of(survey.model, gone), detail=detail)


def _why_not(survey: Survey, site: WeightSite, module: nn.Module | None, own: str) -> str | None:
    if module is None:
        return "it is computed from other parameters already, or is a part of one"
    if parametrize.is_parametrized(module):
        return "its module has a parametrisation already"
    if site.kind == "linear" and len(site.shape) > 2:
        return f"it has {len(site.shape)} axes, as einsum takes it: which of them make one output is not sure"
    weight = module._parameters.get(own)
    if weight is None or not weight.is_floating_point():
        return "it is stored as whole numbers"
    names = [name for name, p in survey.model.named_parameters(remove_duplicate=False) if p is weight]
    if len(names) > 1:
        return f"it is shared ({', '.join(names)}): computed apart, they would no longer be one"
    return class_stays(module)
