"""Weights that are computed from others, and what stands in for norms (8xx)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from normprobe.records import Anatomy, Reparametrization
from tests.faults.edits import at, norm_at, parameter, replace, writing
from tests.faults.fault import Conditions, Fault, NotHereError, Severity, Site, fault
from tests.faults.written import along_features

FORWARD = Conditions(level="forward")
LOST = ("NP504",)


def computed(*kinds: str) -> Any:
    """Weights that are computed in one of these ways, as a function of the Anatomy."""

    def sites(anatomy: Anatomy) -> list[Site]:
        return [Site(one.path, one) for one in anatomy.reparametrizations if one.kind in kinds and one.parameter]

    return sites


NORMED, STANDARDISED = computed("weight_norm", "spectral_norm"), computed("weight_standardization")


def guarded(anatomy: Anatomy, site: Site) -> Severity:
    """An error where 0/0 is NaN."""
    return "warning" if site.detail.zeros else "error"


def first_slice(held: Tensor, one: Reparametrization) -> Tensor:
    """A view of the first slice that one size is taken over."""
    for axis in sorted(set(range(held.dim())) - set(one.axes), reverse=True):
        held = held.select(axis, 0)
    return held


@fault("a slice of zeros in a normed weight", "NP801", guarded, NORMED, FORWARD, LOST)
def empty(model: nn.Module, anatomy: Anatomy, site: Site) -> None:
    with writing():
        first_slice(parameter(model, site.detail.parameter), site.detail).zero_()


@fault("a NaN in a normed weight", "NP801", "error", NORMED, FORWARD, LOST)
def not_a_number(model: nn.Module, anatomy: Anatomy, site: Site) -> None:
    with writing():
        first_slice(parameter(model, site.detail.parameter), site.detail).view(-1)[0] = float("nan")


def with_gain(anatomy: Anatomy) -> list[Site]:
    return [site for site in NORMED(anatomy) if site.detail.gain is not None]


@fault("half of the gains of a normed weight zero", "NP801", "note", with_gain, FORWARD)
def closed(model: nn.Module, anatomy: Anatomy, site: Site) -> None:
    with writing():
        held = parameter(model, site.detail.gain).view(-1)
        held[: -(-held.numel() // 2)] = 0


@fault("a filter of one number in a standardised weight", "NP804", guarded, STANDARDISED, FORWARD, LOST)
def flat(model: nn.Module, anatomy: Anatomy, site: Site) -> None:
    with writing():
        first_slice(parameter(model, site.detail.parameter), site.detail).fill_(0.125)


# ---- bounded functions in the place of norms


class Bent(nn.Module):
    """γ · tanh(α x), in the place of a norm."""

    def __init__(self, slope: float, width: int) -> None:
        super().__init__()
        self.slope, self.weight = nn.Parameter(torch.tensor(slope)), nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor, *more: Tensor) -> Tensor:
        if more:
            raise NotHereError("the norm is given more than what it norms")
        return self.weight * torch.tanh(self.slope * x)


def before_branches(anatomy: Anatomy) -> list[Site]:
    return along_features(anatomy, "pre")


def bend(model: nn.Module, anatomy: Anatomy, site: Site, slope: float) -> None:
    replace(model, site.path, Bent(slope, norm_at(anatomy, site.path).size or 1))


@fault("tanh in place of a norm, far too steep", "NP802", "warning", before_branches, FORWARD)
def steep(model: nn.Module, anatomy: Anatomy, site: Site) -> None:
    bend(model, anatomy, site, 3e4)


@fault("tanh in place of a norm, a straight line", "NP802", "note", before_branches, FORWARD, ("NP103", "NP305"))
def straight(model: nn.Module, anatomy: Anatomy, site: Site) -> None:
    bend(model, anatomy, site, 1e-4)


@fault("tanh in place of a norm, with a slope of 0", "NP802", "error", before_branches, FORWARD)
def level(model: nn.Module, anatomy: Anatomy, site: Site) -> None:
    bend(model, anatomy, site, 0.0)


# ---- constants in the place of norms


def held_by_constants(anatomy: Anatomy) -> list[Site]:
    """The first weights of branches of streams that constants hold, in place of norms."""
    streams = [stream for stream in anatomy.streams if anatomy.held_by_constants(stream)]
    return [Site(b.path, b.entry) for s in streams for b in s.branches if b.entry is not None and b.skip == "identity"]


@fault("the constant before one branch a tenth of what it has to be", "NP803", "warning", held_by_constants, FORWARD)
def off(model: nn.Module, anatomy: Anatomy, site: Site) -> None:
    entry = site.detail

    def larger(run: Any, *args: Any, **kwargs: Any) -> Any:
        operands = list(args)
        operands[entry.operand] = 10 * operands[entry.operand]
        return run(*operands, **kwargs)

    at(model, entry.site, larger)


ALL: tuple[Fault, ...] = (empty, not_a_number, closed, flat, steep, straight, level, off)
