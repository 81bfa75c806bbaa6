"""Store weights as they are, that are computed from others at every forward."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize

from normprobe.errors import RewriteError
from normprobe.records import Anatomy, Reparametrization
from normprobe.rewrites.base import ChosenRewrite, Effect, Refusal, Site, Sites, Survey, full_name, module_at
from normprobe.rewrites.edits import bytes_in, chosen

_READERS = "_load_state_dict_pre_hooks"


@final
@dataclass(frozen=True)
class PlainWeights(ChosenRewrite):
    """Weight norm, spectral norm and weight standardisation go: each weight is stored as it is computed.

    Exact, and the forward is spared the computation. Training goes on differently from there, and an optimiser has to
    be made anew. Parametrisations of torch can be taken away; a module whose own forward computes its weight cannot.

    Attributes:
        only: a pattern of paths of modules, or several; None for all.
    """

    usual = Effect.EXACT

    def describe(self) -> str:
        """What it does, in one line."""
        return "weights that are computed from others at every forward are stored as they are"

    def places(self, survey: Survey) -> Iterator[tuple[str, ...]]:
        """The modules whose weights are computed."""
        return ((one.path,) for one in survey.anatomy.reparametrizations)

    def sites(self, survey: Survey) -> Sites:
        """One site for every weight that is computed."""
        found = [_site(survey, one) for one in survey.anatomy.reparametrizations if chosen(one.path, self.only)]
        sites = {site.claims: site for site in found if isinstance(site, Site)}
        return Sites(tuple(sites.values()), tuple(each for each in found if isinstance(each, Refusal)))

    def change(self, model: nn.Module, site: Site, undo: ExitStack) -> None:
        """Put the computed weight in the place of the parametrisation."""
        module, own = module_at(model, site.path), site.detail
        held = module.get_submodule("parametrizations")
        learns = any(parameter.requires_grad for parameter in held.get_submodule(own).parameters())
        with torch.no_grad():
            value = _computed(module, own)
        module.__class__ = _without(type(module), own, last=len(held._modules) == 1)
        held._modules.pop(own)
        if not held._modules:
            module._modules.pop("parametrizations")
            _drop_readers(module)
        module._parameters[own] = nn.Parameter(value, requires_grad=learns)

    def confirm(self, sites: tuple[Site, ...], anatomy: Anatomy) -> None:
        """Check that none of the weights reads as computed."""
        left = {each.path for each in anatomy.reparametrizations}
        for site in sites:
            if site.path in left:
                what = f"PlainWeights did not take hold at {site.path}"
                raise RewriteError(what, expected="a plain weight", found="a computed one")


def _site(survey: Survey, one: Reparametrization) -> Site | Refusal:
    inside = one.parameter.split(".parametrizations.")
    if len(inside) != 2:
        return Refusal(one.path, "its own forward, or an older hook, computes the weight: there is no parametrisation")
    path, own = inside[0], inside[1].split(".")[0]
    module = module_at(survey.model, path or ".")
    if not parametrize.is_parametrized(module, own):
        return Refusal(one.path, "there is no parametrisation of torch to take away")
    change = f"{own} is stored as it is ({one.kind.replace('_', ' ')} goes)"
    held = module.get_submodule(f"parametrizations.{own}")
    gone = tuple(full_name(path or ".", f"parametrizations.{own}.{name}") for name, _ in held.named_parameters())
    added = (full_name(path or ".", own),)
    return Site(path or ".", change, added=added, gone=gone, undo_bytes=bytes_in(held), detail=own)


def _computed(module: nn.Module, own: str) -> Tensor:
    """The weight as it is in eval mode: spectral norm moves its vectors in train mode."""
    training = {each: each.training for each in module.modules()}
    module.eval()
    value: Tensor = getattr(module, own).detach().clone()
    for each, mode in training.items():
        each.training = mode
    return value


def _without(kind: type[nn.Module], own: str, last: bool) -> type[nn.Module]:
    """The class that torch made for a parametrised module, without the property that computes `own`; copies of the
    module share the class, which stays as it is."""
    if last:
        below: type[nn.Module] = kind.__bases__[0]
        return below
    kept = {name: value for name, value in vars(kind).items() if name not in (own, "__dict__", "__weakref__")}
    return type(kind.__name__, kind.__bases__, kept)


def _drop_readers(module: nn.Module) -> None:
    """Without the hooks by which torch reads older checkpoints into the parametrisation; they cannot be pickled."""
    hooks = module.__dict__[_READERS]
    for key, hook in list(hooks.items()):
        if getattr(getattr(hook, "hook", hook), "__module__", "") == parametrizations.__name__:
            del hooks[key]
