"""What a norm by itself does wrong: eps, precision, gains, names, and what the optimiser does to it (1xx)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from normprobe.records import Anatomy, NormSite
from tests.faults.edits import norm_at, parameter, replace, writing
from tests.faults.fault import Conditions, Fault, NotHereError, Site, Sites, fault
from tests.faults.written import Form, Written, along_features, rewrite

ON_STREAM = ("pre", "post", "output", "final")
HALF16, HALFB = Conditions(dtype="float16"), Conditions(dtype="bfloat16")
FORWARD = Conditions(level="forward")


def every(anatomy: Anatomy) -> list[Site]:
    return along_features(anatomy)


def given(dtype: str) -> Sites:
    """Norms that are given this dtype."""
    return lambda anatomy: [s for s in every(anatomy) if norm_at(anatomy, s.path).dtype == dtype]


# ---- eps


@fault("eps added to the root instead of into it", "NP101", "warning", every)
def outside(model: nn.Module, anatomy: Anatomy, site: Site) -> None:
    rewrite(model, anatomy, site, place="outside", eps=max(norm_at(anatomy, site.path).eps or 0, 1e-5))


@fault("the root clamped at eps", "NP101", "warning", every)
def clamped(model: nn.Module, anatomy: Anatomy, site: Site) -> None:
    rewrite(model, anatomy, site, place="clamp", eps=max(norm_at(anatomy, site.path).eps or 0, 1e-5))


@fault("eps 1e-12 added in float16", "NP102", "error", given("float16"), HALF16)
def vanishing(model: nn.Module, anatomy: Anatomy, site: Site) -> None:
    rewrite(model, anatomy, site, eps=1e-12, wide=False)


@fault(
    "F.normalize with its eps of 1e-12 in float16, times the root of the width",
    "NP102",
    "error",
    given("float16"),
    HALF16,
)
def normalised(model: nn.Module, anatomy: Anatomy, site: Site) -> None:
    norm = norm_at(anatomy, site.path)
    replace(model, site.path, Normalised(parameter(model, norm.weight) if norm.weight else None, norm.size or 1))


class Normalised(nn.Module):
    """Unit length by torch's own function, times √width and a gain."""

    def __init__(self, weight: Tensor | None, width: int) -> None:
        super().__init__()
        self.weight, self.factor = None if weight is None else nn.Parameter(weight.detach()), width**0.5

    def forward(self, x: Tensor, *more: Tensor) -> Tensor:
        if more or (self.weight is not None and self.weight.numel() != x.shape[-1]):
            raise NotHereError("the norm is given more than what it norms, or its gain is of several of them")
        y = nn.functional.normalize(x, dim=-1) * self.factor
        return y if self.weight is None else y * self.weight


def beside_the_stream(anatomy: Anatomy) -> list[Site]:
    """Norms that read a stream of features on the last axis."""
    paths = {b.pre_norm for s in anatomy.streams for b in s.branches if s.feature_axis == -1}
    paths |= {b.post_norm for s in anatomy.streams for b in s.branches if s.feature_axis == -1}
    paths |= {s.final_norm for s in anatomy.streams if s.feature_axis == -1}
    return [site for site in every(anatomy) if site.path in paths]


@fault("eps a thousand times what customary signals have", "NP103", "warning", beside_the_stream, FORWARD)
def dominating(model: nn.Module, anatomy: Anatomy, site: Site) -> None:
    rewrite(model, anatomy, site, eps=1e3, place="inside")


def where_all_are_known(anatomy: Anatomy) -> list[Site]:
    """One site, the first norm on a stream, where all of these can be written by hand."""
    found = along_features(anatomy, *ON_STREAM)
    norms = [n for n in anatomy.norms if n.role in ON_STREAM and n.executed]
    return found[:1] if len(found) == len(norms) else []


@fault(
    "eps of every norm from another library's default",
    "NP104",
    "warning",
    where_all_are_known,
    Conditions(states="eps"),
)
def other_eps(model: nn.Module, anatomy: Anatomy, site: Site) -> None:
    for one in along_features(anatomy, *ON_STREAM):
        rewrite(model, anatomy, one, eps=3e-4)


def with_peers(anatomy: Anatomy) -> list[Site]:
    """Norms before branches, of which there are three with one eps in one place."""
    found = []
    for stream in anatomy.streams:
        norms = [anatomy.norm(b.pre_norm) for b in stream.branches if b.pre_norm is not None]
        norms = [n for n in dict.fromkeys(norms) if n is not None]
        same = len({(n.kind, n.eps_placement, n.eps) for n in norms}) == 1
        found += [n.path for n in norms] if len(norms) >= 3 and same else []
    return [site for site in every(anatomy) if site.path in found]


@fault("eps of one norm left at another default", "NP105", "warning", with_peers)
def mixed_eps(model: nn.Module, anatomy: Anatomy, site: Site) -> None:
    rewrite(model, anatomy, site, eps=30 * (norm_at(anatomy, site.path).eps or 1e-6))


# ---- precision


@fault("squares summed in float16", "NP106", "error", given("float16"), HALF16)
def reduced_in_float16(model: nn.Module, anatomy: Anatomy, site: Site) -> None:
    rewrite(model, anatomy, site, wide=False, eps=1e-5)


@fault("squares summed in bfloat16", "NP106", "warning", given("bfloat16"), HALFB)
def reduced_in_bfloat16(model: nn.Module, anatomy: Anatomy, site: Site) -> None:
    rewrite(model, anatomy, site, wide=False)


@fault("the float32 cast left out, in a model that runs in float32", "NP106", "note", every)
def not_cast(model: nn.Module, anatomy: Anatomy, site: Site) -> None:
    rewrite(model, anatomy, site, wide=False)


def gained_early(anatomy: Anatomy) -> list[Site]:
    known = {n.path for n in anatomy.norms if n.weight is not None and n.weight_multiply != "after_cast"}
    return [site for site in given("bfloat16")(anatomy) if site.path in known]


@fault("rounded to bfloat16 before the gain", "NP107", "note", gained_early, HALFB)
def late_gain(model: nn.Module, anatomy: Anatomy, site: Site) -> None:
    norm = norm_at(anatomy, site.path)
    with writing() as generator:
        held = parameter(model, norm.weight)
        held.add_(0.3 * torch.rand(held.shape, generator=generator).to(held))
    rewrite(model, anatomy, site, late=True)


# ---- names


def called(name: str, form: Form, weight: Tensor | None) -> nn.Module:
    """A norm of this form whose class has this name."""
    kind = type(name, (Written,), {"__module__": __name__})
    made: nn.Module = kind(form, weight, None)
    return made


@fault("a root mean square called LayerNorm", "NP108", "note", every)
def misnamed(model: nn.Module, anatomy: Anatomy, site: Site) -> None:
    norm = norm_at(anatomy, site.path)
    gain = parameter(model, norm.weight) if norm.weight is not None else None
    replace(model, site.path, called("LayerNorm", Form(False, norm.eps or 1e-6), gain))


@fault("a layer norm called RMSNorm", "NP108", "note", every)
def misnamed_too(model: nn.Module, anatomy: Anatomy, site: Site) -> None:
    norm = norm_at(anatomy, site.path)
    gain = parameter(model, norm.weight) if norm.weight is not None else None
    replace(model, site.path, called("RMSNorm", Form(True, norm.eps or 1e-6), gain))


# ---- gains


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
    outside,
    clamped,
    vanishing,
    normalised,
    dominating,
    other_eps,
    mixed_eps,
    reduced_in_float16,
    reduced_in_bfloat16,
    not_cast,
    late_gain,
    misnamed,
    misnamed_too,
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
