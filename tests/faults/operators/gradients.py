"""Gradients that fade, grow or break on their way back, and values that are not finite (5xx)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from normprobe.records import Anatomy
from tests.faults.edits import before, behind, module_at, parameter, writing
from tests.faults.fault import Conditions, Fault, Severity, Site, fault
from tests.faults.operators.placement import adds_within, blocks
from tests.faults.operators.residual import apart

BACKWARD, FORWARD = Conditions(level="backward"), Conditions(level="forward")


def longest(anatomy: Anatomy) -> list[Site]:
    """The longest stream, of three or more blocks that are modules of their own, one behind the other."""
    stream = max(anatomy.streams, key=lambda s: len(s.branches), default=None)
    if stream is None or stream.topology != "ordinary" or len(blocks(stream)) < 3:
        return []
    if not apart(stream) or not adds_within(stream):
        return []
    if any(f"{one}." in f"{other}." for one in blocks(stream) for other in blocks(stream) if one != other):
        return []
    return [Site(stream.name, stream)]


def unless_fresh(anatomy: Anatomy, site: Site) -> Severity:
    """A warning; a note beside batch norms, which norm nothing in eval mode before their statistics have moved."""
    return "note" if any(norm.kind == "batchnorm" for norm in anatomy.norms) else "warning"


class Weighed(torch.autograd.Function):
    """The same values, and a gradient that is multiplied."""

    @staticmethod
    def forward(context: Any, x: Tensor, factor: float) -> Tensor:
        context.factor = factor
        return x.view_as(x)

    @staticmethod
    def backward(context: Any, *gradients: Tensor) -> Any:
        return context.factor * gradients[0], None


def weigh_each(model: nn.Module, site: Site, factor: float) -> None:
    for path in blocks(site.detail)[1:]:
        before(module_at(model, path), lambda x: Weighed.apply(x, factor))


@fault("gradients between blocks a thousandth", "NP502", unless_fresh, longest, BACKWARD)
def fading(model: nn.Module, anatomy: Anatomy, site: Site) -> None:
    weigh_each(model, site, 1e-3)


@fault("gradients between blocks a thousandfold", "NP503", unless_fresh, longest, BACKWARD)
def growing(model: nn.Module, anatomy: Anatomy, site: Site) -> None:
    weigh_each(model, site, 1e3)


def level(anatomy: Anatomy) -> list[Site]:
    """Streams whose placement gives gradients no slope of its own, as the norms on the sums of a post-norm stack do:
    what is planted adds to it there, as far as NP503's, or takes it away."""
    return [site for site in longest(anatomy) if site.detail.placement not in ("post", "deepnorm")]


@fault("gradients between blocks some tenfold", "NP501", unless_fresh, level, BACKWARD)
def uneven(model: nn.Module, anatomy: Anatomy, site: Site) -> None:
    weigh_each(model, site, 60 ** (1 / (len(blocks(site.detail)) - 1)))


def weights(anatomy: Anatomy) -> list[Site]:
    """Weights of products and convolutions on the way to an output."""
    held = [w for w in anatomy.weights if set(w.roles) & {"reader", "writer", "head", "inner"}]
    return [Site(weight.parameter) for weight in held]


@fault("a NaN in a weight", "NP504", "error", weights, FORWARD)
def broken(model: nn.Module, anatomy: Anatomy, site: Site) -> None:
    with writing():
        parameter(model, site.path).view(-1)[0] = float("nan")


@fault("infinity in a weight", "NP504", "error", weights, FORWARD)
def infinite(model: nn.Module, anatomy: Anatomy, site: Site) -> None:
    with writing():
        parameter(model, site.path).view(-1)[:3] = float("inf")


@fault("a root of zero on the way back", "NP504", "error", longest, BACKWARD)
def steep(model: nn.Module, anatomy: Anatomy, site: Site) -> None:
    path = blocks(site.detail)[1]
    behind(module_at(model, path), lambda x: x + torch.sqrt(0 * x.square()))


ALL: tuple[Fault, ...] = (fading, growing, uneven, broken, infinite, steep)
