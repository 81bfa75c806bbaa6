"""What a norm holds that is wrong: gains, lost keys, and what the optimiser does to them (1xx)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from normprobe.records import Anatomy, NormSite
from tests.faults.edits import norm_at, parameter, writing
from tests.faults.fault import Conditions, Fault, NotHereError, Site, fault

FORWARD = Conditions(level="forward")


def gained(anatomy: Anatomy) -> list[Site]:
    """Norms of any kind with a gain of several elements that run."""
    return [
        Site(n.path)
        for n in anatomy.norms
        if n.weight is not None and n.executed and n.affine != "other" and n.kind not in ("affine", "identity", "dyt")
    ]


def gain_of(model: nn.Module, anatomy: Anatomy, site: Site) -> tuple[Tensor, bool]:
    """The stored gain, and whether 1 is added to it."""
    norm = norm_at(anatomy, site.path)
    held = parameter(model, norm.weight)
    if held.numel() < 8:
        raise NotHereError("a gain of few elements")
    return held, norm.affine.startswith("one_plus")


NAN = ("NP504",)


@fault("a gain with one NaN", "NP109", "error", gained, also=NAN)
def nan_gain(model: nn.Module, anatomy: Anatomy, site: Site) -> None:
    with writing():
        gain_of(model, anatomy, site)[0].flatten()[3] = float("nan")


@fault("a gain of what memory held: tiny numbers", "NP109", "error", gained, FORWARD, also=NAN)
def tiny_gain(model: nn.Module, anatomy: Anatomy, site: Site) -> None:
    with writing():
        held = gain_of(model, anatomy, site)[0]
        held.copy_(1e-41 * torch.arange(1, held.numel() + 1).view(held.shape))


@fault("a gain of what memory held: huge numbers", "NP109", "error", gained, also=NAN)
def huge_gain(model: nn.Module, anatomy: Anatomy, site: Site) -> None:
    with writing():
        gain_of(model, anatomy, site)[0].fill_(3e30)


@fault("a gain drawn about 0 in a new model", "NP109", "warning", gained, FORWARD)
def drawn_gain(model: nn.Module, anatomy: Anatomy, site: Site) -> None:
    with writing() as generator:
        held, one_plus = gain_of(model, anatomy, site)
        held.copy_(0.5 * torch.randn(held.shape, generator=generator) - float(one_plus))


def through(anatomy: Anatomy) -> list[Site]:
    """Norms that all of the signal passes: before branches, behind sums, at the end."""
    known = {n.path for n in anatomy.norms if n.role in ("pre", "post", "final")}
    beside = {b.output_norm for s in anatomy.streams for b in s.branches}
    return [site for site in gained(anatomy) if site.path in known - beside]


@fault("a gain of zeros", "NP110", "error", through)
def zero_gain(model: nn.Module, anatomy: Anatomy, site: Site) -> None:
    with writing():
        held, one_plus = gain_of(model, anatomy, site)
        held.fill_(-1.0 if one_plus else 0.0)


@fault("three quarters of a gain zero", "NP110", "warning", through)
def partly_zero_gain(model: nn.Module, anatomy: Anatomy, site: Site) -> None:
    with writing():
        held, one_plus = gain_of(model, anatomy, site)
        held.flatten()[: -(-3 * held.numel() // 4)] = -1.0 if one_plus else 0.0


def not_batch(anatomy: Anatomy) -> list[Site]:
    known = {n.path for n in anatomy.norms if n.kind != "batchnorm"}
    return [site for site in gained(anatomy) if site.path in known]


@fault("one channel of a gain five thousand times the others", "NP111", "warning", not_batch)
def outlier_gain(model: nn.Module, anatomy: Anatomy, site: Site) -> None:
    with writing():
        held, _ = gain_of(model, anatomy, site)
        held.flatten()[5] = 5000.0


def one_plus(anatomy: Anatomy) -> list[Site]:
    return [Site(n.path) for n in anatomy.norms if n.executed and n.weight and n.affine.startswith("one_plus")]


@fault("1 added to all weights of norms that apply 1 + w", "NP112", "warning", lambda anatomy: one_plus(anatomy)[:1])
def doubled_offsets(model: nn.Module, anatomy: Anatomy, site: Site) -> None:
    with writing():
        held = [parameter(model, norm_at(anatomy, one.path).weight) for one in one_plus(anatomy)]
        for weight in {id(one): one for one in held}.values():
            weight.add_(1.0)


def one_plus_with_peers(anatomy: Anatomy) -> list[Site]:
    roles = [norm_at(anatomy, site.path).role for site in one_plus(anatomy)]
    return [site for site in one_plus(anatomy) if roles.count(norm_at(anatomy, site.path).role) >= 3]


@fault("1 added to the weight of one norm that applies 1 + w", "NP112", "warning", one_plus_with_peers)
def doubled_offset(model: nn.Module, anatomy: Anatomy, site: Site) -> None:
    with writing():
        parameter(model, norm_at(anatomy, site.path).weight).add_(1.0)


# ---- keys that were lost


def look_trained(model: nn.Module, anatomy: Anatomy, inputs: Any) -> None:
    """Weights whose rows and columns differ in size, as those of trained models do, and gains that have moved."""
    with writing() as generator:
        for site in anatomy.weights:
            held = parameter(model, site.parameter)
            rows = torch.randn(held.shape[0], *[1] * (held.dim() - 1), generator=generator)
            held.mul_((0.7 * rows).exp().to(held))
        for name in {n.weight for n in anatomy.norms if n.weight} | {n.bias for n in anatomy.norms if n.bias}:
            held = parameter(model, name)
            held.add_(0.1 * torch.randn(held.shape, generator=generator).to(held))


TRAINED = Conditions(level="forward", prepare=look_trained)


def start(model: nn.Module, norm: NormSite) -> None:
    """Gain and offset as they are constructed."""
    with writing():
        if norm.weight is not None:
            parameter(model, norm.weight).fill_(0.0 if norm.affine.startswith("one_plus") else 1.0)
        if norm.bias is not None:
            parameter(model, norm.bias).zero_()


def gained_with_kin(anatomy: Anatomy) -> list[Site]:
    """Norms with a gain of several elements, of which others of their kind have one too."""
    norms = [n for n in anatomy.norms if n.executed and n.weight is not None and n.kind in ("layernorm", "rmsnorm")]
    kinds = [n.kind for n in norms]
    return [Site(n.path) for n in norms if kinds.count(n.kind) > 1]


@fault("the keys of one norm lost in loading a trained model", "NP113", "warning", gained_with_kin, TRAINED)
def lost_keys(model: nn.Module, anatomy: Anatomy, site: Site) -> None:
    gain_of(model, anatomy, site)
    start(model, norm_at(anatomy, site.path))


@fault(
    "the keys of all norms lost in loading a trained model", "NP113", "note", lambda a: gained_with_kin(a)[:1], TRAINED
)
def all_keys_lost(model: nn.Module, anatomy: Anatomy, site: Site) -> None:
    for norm in anatomy.norms:
        start(model, norm)


# ---- the optimiser


def decaying(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), weight_decay=0.1)


def decaying_named(model: nn.Module) -> torch.optim.Optimizer:
    """The usual list of names, which misses most norms: biases alone go without decay."""
    named = dict(model.named_parameters())
    free = [p for n, p in named.items() if n.endswith("bias") or "LayerNorm.weight" in n]
    rest = [p for p in named.values() if all(p is not q for q in free)]
    groups = [{"params": rest, "weight_decay": 0.01}, {"params": free, "weight_decay": 0.0}]
    return torch.optim.AdamW([group for group in groups if group["params"]])


def sparing(model: nn.Module, anatomy: Anatomy) -> torch.optim.Optimizer:
    """Decay for everything but the gains and offsets of norms."""
    held = {n.weight for n in anatomy.norms} | {n.bias for n in anatomy.norms}
    named = dict(model.named_parameters())
    groups = [
        {"params": [p for n, p in named.items() if n not in held], "weight_decay": 0.1},
        {"params": [p for n, p in named.items() if n in held], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW([group for group in groups if group["params"]], lr=1e-2)


def plain_gains(anatomy: Anatomy) -> list[Site]:
    """The first norm whose gain is applied as it is, which decay pulls to 0."""
    return [s for s in gained(anatomy) if not norm_at(anatomy, s.path).affine.startswith("one_plus")][:1]


def nothing(model: nn.Module, anatomy: Anatomy, site: Site) -> None:
    """The fault is the optimiser's."""


decay = fault(
    "one group with decay for all parameters",
    "NP114",
    "warning",
    plain_gains,
    Conditions(optimizer=decaying, sound=sparing),
)(nothing)


def not_spared(anatomy: Anatomy) -> list[Site]:
    """The same, if no name of a gain is on the list."""
    sites = [s for s in plain_gains(anatomy) if "LayerNorm.weight" not in (norm_at(anatomy, s.path).weight or "")]
    return sites if all("LayerNorm.weight" not in (n.weight or "") for n in anatomy.norms) else []


decay_by_name = fault(
    "a list of names that misses the norms",
    "NP114",
    "warning",
    not_spared,
    Conditions(optimizer=decaying_named, sound=sparing),
)(nothing)


def small_steps(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-4, weight_decay=0.0)


lost_steps = fault(
    "bfloat16 gains under steps of 1e-4",
    "NP115",
    "warning",
    plain_gains,
    Conditions(dtype="bfloat16", optimizer=small_steps, sound=sparing),
)(nothing)


ALL: tuple[Fault, ...] = (
    nan_gain,
    tiny_gain,
    huge_gain,
    drawn_gain,
    zero_gain,
    partly_zero_gain,
    outlier_gain,
    doubled_offsets,
    doubled_offset,
    lost_keys,
    all_keys_lost,
    decay,
    decay_by_name,
    lost_steps,
)
