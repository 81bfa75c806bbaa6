"""What a batch norm keeps: its statistics, gain and offset, by the names that they have in the module."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from normprobe.norms.running import running
from normprobe.records import NormSite
from normprobe.rewrites.base import Refusal, Site, Sites, Survey, module_at
from normprobe.rewrites.edits import chosen
from normprobe.rewrites.norms.computed import call_of, own_name
from normprobe.rewrites.swap import why_not as class_stays


@dataclass(frozen=True)
class Held:
    """Names relative to the module; gain and offset are None where it has none."""

    mean: str
    variance: str
    eps: float
    weight: str | None
    bias: str | None

    def statistics(self, module: nn.Module) -> tuple[Tensor, Tensor]:
        """The stored mean and variance of each channel, (C,) in float64."""
        return module.get_buffer(self.mean).double(), module.get_buffer(self.variance).double()

    def affine(self, module: nn.Module) -> tuple[Tensor, Tensor]:
        """Gain and offset of each channel, (C,) in float64: 1 and 0 where there are none."""
        mean, _ = self.statistics(module)
        gain, offset = torch.ones_like(mean), torch.zeros_like(mean)
        if self.weight is not None:
            gain = module.get_parameter(self.weight).detach().double().flatten()
        return gain, offset if self.bias is None else module.get_parameter(self.bias).detach().double().flatten()


def held_of(survey: Survey, norm: NormSite) -> Held | str:
    """What a batch norm keeps, or why it cannot be used."""
    call = call_of(survey, norm.path)
    if not norm.module or call is None:
        return "it is written out inside another module's forward"
    module = module_at(survey.model, norm.path)
    if (why := class_stays(module)) is not None:
        return why
    if any(True for _ in module.children()):
        return "it is made of modules of its own"
    found = running(module, call, norm.axes)
    if found.mean is None or found.variance is None:
        return "it stores no mean and variance"
    if norm.eps is None or norm.eps_placement != "inside_sqrt" or norm.affine not in ("weight+bias", "weight", "none"):
        return f"its eps ({norm.eps_placement}) or its gain ({norm.affine}) could not be read"
    names = (None if name is None else own_name(norm, name) for name in (norm.weight, norm.bias))
    return Held(found.mean, found.variance, norm.eps, *names)


def batch_norm_sites(
    survey: Survey, only: str | tuple[str, ...] | None, site: Callable[[NormSite], Site | str | None]
) -> Sites:
    """The sites of the batch norms that ran and are chosen; `site` gives None where nothing is to be done."""
    norms = [n for n in survey.anatomy.norms if n.kind == "batchnorm" and n.executed and chosen(n.path, only)]
    found = [(norm.path, site(norm)) for norm in norms]
    sites = tuple(each for _, each in found if isinstance(each, Site))
    return Sites(sites, tuple(Refusal(path, each) for path, each in found if isinstance(each, str)))
