"""What a norm by itself does wrong: eps, precision, names (1xx)."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from normprobe.records import Anatomy
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


@fault("an eps of 0", "NP102", "warning", every, also=("NP104", "NP105"))
def unguarded(model: nn.Module, anatomy: Anatomy, site: Site) -> None:
    rewrite(model, anatomy, site, eps=0.0, place="inside")


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


@fault(
    "eps a thousand times what customary signals have",
    "NP103",
    "warning",
    beside_the_stream,
    FORWARD,
    ("NP104", "NP105"),
)
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


ALL: tuple[Fault, ...] = (
    outside,
    clamped,
    vanishing,
    unguarded,
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
)
