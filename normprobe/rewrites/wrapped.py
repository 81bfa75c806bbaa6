"""Parameters that are tensors of a class of their own, as quantised ones are: no rewrite changes these."""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from normprobe.rewrites.base import Refusal, Rewrite, Site, Sites, module_at


def plain_sites(rewrite: Rewrite, model: nn.Module, found: Sites) -> Sites:
    """`found` without the sites that change such a parameter or the forward of the module that has it.

    These tensors say that they hold floats, whatever they store: what is written into them would be rounded anew, or
    not arrive. Where the sites of a rewrite hold together alone, one such refuses all.
    """
    named = dict(model.named_parameters(remove_duplicate=False))
    whys = [_wrapped(model, site, named) for site in found.sites]
    first = next((why for why in whys if why is not None), None)
    if first is None:
        return found
    if rewrite.TOGETHER:
        whys = [why or first for why in whys]
    kept = tuple(site for site, why in zip(found.sites, whys, strict=True) if why is None)
    refused = {s.path: Refusal(s.path, why) for s, why in zip(found.sites, whys, strict=True) if why is not None}
    return Sites(kept, (*found.refused, *refused.values()), found.notes)


def _wrapped(model: nn.Module, site: Site, named: Mapping[str, nn.Parameter]) -> str | None:
    held = {name: named[name] for name in (*site.touched, *site.gone) if name in named}
    own = module_at(model, site.path).named_parameters(prefix="" if site.path == "." else site.path, recurse=False)
    for name, parameter in (held | dict(own) if site.forward else held).items():
        if _has_class(parameter):
            return f"{name} is a {type(parameter).__name__}, which stores its numbers in a way of its own"
    return None


def _has_class(value: object) -> bool:
    return is_traceable_wrapper_subclass(value)
