"""How the weights of a model were drawn, read from a seeded sample of their values."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from typing import Any, get_args

import torch
from torch import Tensor, nn

from normprobe.measures.activations import second_moment
from normprobe.measures.draws import Fit, fit
from normprobe.measures.equal_outputs import copied, copies, repeated, same_outputs
from normprobe.measures.init_faults import misread
from normprobe.measures.own_init import own_weights
from normprobe.measures.recipes import Drawn, recipes
from normprobe.measures.values import plain
from normprobe.records import Anatomy, Basis, Skipped, WeightSite
from normprobe.records.anatomy import BranchKind
from normprobe.records.init import Distribution, Initialisation, RoleMeasure, WeightMeasure
from normprobe.records.parts import whole
from normprobe.records.weights import WeightRole

_MOST, _FEW = 0.9, 0.5  # shares of the weights
_ALL = 0.95  # of the weights of a role: one in a thousand lies outside its interval by chance


def measure_initialisation(
    model: nn.Module, anatomy: Anatomy, seed: int = 0
) -> tuple[Initialisation | None, tuple[Skipped, ...]]:
    """Read distribution, scale and recipe of every weight of `anatomy`, without running the model.

    Args:
        model: the model that `anatomy` was read from.
        anatomy: its weights, norms and streams.
        seed: of the sample of values.

    Returns:
        The measure (None without a weight), and the weights that could not be read with the reason.
    """
    named = dict(model.named_parameters())
    read = {w.parameter: named[w.parameter] for w in anatomy.weights if plain(named.get(w.parameter))}
    fits = [(w, _fit(read[w.parameter], w, seed)) for w in anatomy.weights if w.parameter in read]
    told = [f if f.distribution != "unknown" else _whole(read[w.parameter], w, f, anatomy, seed) for w, f in fits]
    trained, drawn, evidence = _trained(anatomy, named, told)
    dtypes = {n: str(p.dtype).removeprefix("torch.") for n, p in read.items()}
    own, why = ({}, "") if trained is not False else own_weights(model, seed)
    weights = tuple(_measure(w, f, () if trained else _recipes(w, f, anatomy), dtypes[w.parameter]) for w, f in fits)
    if not trained:
        facts = {w.parameter: _facts(w, f, read[w.parameter], own.get(w.parameter), seed) for w, f in fits}
        _experts(facts, anatomy, [site for site, _ in fits], read)
        weights = tuple(w.model_copy(update=_fitting(w, facts[w.parameter])) for w in weights)
    unread = [w.parameter for w in anatomy.weights if w.parameter not in read]
    lost, odd = [n for n in unread if n not in named], [n for n in unread if n in named]
    skipped = (
        *_skips(lost, "the model has no parameter of this name any more"),
        *_skips(odd, "its values are no plain numbers of 16 bits or more"),
        *_skips(_unused(anatomy, named), "no product, convolution or lookup with it was seen"),
    )
    if not weights:
        return None, skipped
    writes = tuple(len(stream.branches) for stream in anatomy.streams)
    roles = tuple(_roles(weights, {site.parameter: site for site in anatomy.weights}))
    known = {"trained": trained, "drawn": drawn, "evidence": evidence, "own_reason": why}
    return Initialisation(**known, writes=writes, roles=roles, weights=weights), skipped


def _facts(site: WeightSite, found: Fit, parameter: Tensor, own: Tensor | None, seed: int) -> dict[str, Any]:
    """What is told of weights that do not look trained alone."""
    twin = None if own is None or own.shape != parameter.shape else _fit(own, site, seed)
    return {
        "same_outputs": same_outputs(parameter, site),
        "repeated": repeated(parameter, site),
        "copies": copies(parameter, site),
        "misread": misread(site, found),
        "own": None if twin is None else (twin.std, twin.interval),
    }


def _experts(
    facts: Mapping[str, dict[str, Any]], anatomy: Anatomy, sites: Sequence[WeightSite], read: Mapping[str, Tensor]
) -> None:
    """Say of experts in weights of their own which are copies, and of matrices that are layers that they are none."""
    for name, other in _copied(anatomy, sites, read).items():
        facts[name]["copy_of"] = other
    for name in facts.keys() & _layers(anatomy, facts):
        facts[name]["copies"] = 0


def _copied(anatomy: Anatomy, sites: Sequence[WeightSite], read: Mapping[str, Tensor]) -> dict[str, str]:
    """Weights of experts that hold the numbers of another one of their branch, and that one."""
    found: dict[str, str] = {}
    branches: dict[tuple[int, int], list[WeightSite]] = {}
    for site in sites:
        if site.stream is not None and site.branch is not None:
            branches.setdefault((site.stream, site.branch), []).append(site)
    for (stream, branch), held in branches.items():
        if anatomy.streams[stream].branches[branch].kind == "moe":
            found |= copied(read, held)
    return found


def _layers(anatomy: Anatomy, named: Container[str]) -> set[str]:
    """Parameters that hold a matrix for each of several layers, none of them of experts."""
    used: dict[str, list[BranchKind]] = {}
    for branch in (branch for stream in anatomy.streams for branch in stream.branches):
        for name in {whole(one, named) for one in branch.parameters}:
            used.setdefault(name, []).append(branch.kind)
    return {name for name, kinds in used.items() if len(kinds) > 1 and "moe" not in kinds}


def _fitting(weight: WeightMeasure, facts: dict[str, Any]) -> dict[str, Any]:
    """A weight that fits a recipe with its own fans was not misread; by fan_out is how one stored as [in, out] is."""
    return facts | {"misread": ()} if {*weight.recipes} - {"kaiming_fan_out"} else facts


def _fit(parameter: Tensor, site: WeightSite, seed: int) -> Fit:
    return fit(parameter, seed, kernel=site.kind == "conv", table=site.kind == "embedding")


def _whole(parameter: Tensor, site: WeightSite, found: Fit, anatomy: Anatomy, seed: int) -> Fit:
    """How a weight was drawn that makes queries, keys and values at once and fits nothing as a whole: as the first part
    was where each part fits by itself (DeepNorm draws values smaller than queries), else as was `found`."""
    parts = [
        torch.cat([parameter.narrow(rows.axis, a, b - a) for head in rows.heads for a, b in head], rows.axis)
        for one in anatomy.attention
        for rows in one.columns.values()
        if rows.parameter == site.parameter and rows.heads
    ]
    fits = [_fit(part, site, seed) for part in parts]
    return fits[0] if len(fits) > 1 and all(f.distribution != "unknown" for f in fits) else found


def _unused(anatomy: Anatomy, named: Mapping[str, Tensor]) -> list[str]:
    """Parameters of two axes or more that are no weight of the Anatomy and belong to no norm."""
    known = {w.parameter for w in anatomy.weights}
    known |= {whole(name, named) for n in anatomy.norms for name in (n.weight, n.bias) if name is not None}
    return [name for name, p in named.items() if p.dim() > 1 and name not in known]


def _skips(names: Sequence[str], why: str) -> Iterator[Skipped]:
    if names:
        others = f" and {len(names) - 1} more" if len(names) > 1 else ""
        yield Skipped(what=f"initialisation of {names[0]}{others}", why=why)


def _measure(site: WeightSite, found: Fit, names: tuple[str, ...], dtype: str) -> WeightMeasure:
    gain = found.std * site.fan_in**0.5
    return WeightMeasure(
        parameter=site.parameter,
        roles=site.roles,
        distribution=found.distribution,
        mean=found.mean,
        std=found.std,
        interval=found.interval,
        gain=gain,
        gain_back=found.std * site.fan_out**0.5,
        followed_by=site.followed_by,
        moment=None if site.kind == "embedding" else second_moment(site.followed_by, gain, site.slope),
        recipes=names,
        basis=Basis(unit="1", dtype=dtype, count=found.count, exact=found.exact),
    )


def _recipes(site: WeightSite, found: Fit, anatomy: Anatomy) -> tuple[str, ...]:
    """The recipes that fit; those of kernels may have been given torch's own counts of fans as well, which know no
    groups and take a transposed kernel for a plain one; those of tables are given the sides of the table."""
    shape = site.shape
    fans = [(site.fan_in, site.fan_out)]
    if site.kind == "conv":
        places = torch.Size(shape[2:]).numel()
        fans.append((shape[1] * places, shape[0] * places))
    elif site.kind == "embedding":
        fans = [(shape[1], shape[0])]
    return recipes(tuple(Drawn.of(site, anatomy, pair, found.distribution) for pair in fans), found.interval, found.cut)


def _trained(
    anatomy: Anatomy, named: Mapping[str, Tensor], fits: Sequence[Fit]
) -> tuple[bool | None, float | None, tuple[str, ...]]:
    """Whether the weights were trained: norms have left their start (gains all equal, offsets all zero), and weights
    fit no distribution that one draws from or differ from row to row. And the share of weights that fit one."""
    learned = [named[n] for s in anatomy.norms for n in (s.weight, s.bias) if n is not None and plain(named.get(n))]
    moved = sum(not bool((p == p.flatten()[0]).all()) for p in learned if p.numel() > 1)
    norms = sum(p.numel() > 1 for p in learned)
    judged = [f for f in fits if f.distribution != "unknown" or (f.count >= 1000 and math.isfinite(f.std))]
    drawn = sum(f.distribution != "unknown" for f in judged)
    evidence = []
    if norms:
        evidence.append(f"{norms - moved} of {norms} gains and offsets of norms are at their start")
    if judged:
        evidence.append(f"{drawn} of {len(judged)} weights fit a distribution that weights are drawn from")
    share = drawn / len(judged) if judged else None
    if share is None:
        return None, None, tuple(evidence)
    if share >= _MOST and moved == 0:
        return False, share, tuple(evidence)
    return (True if share < _FEW and (moved or not norms) else None), share, tuple(evidence)


def _roles(weights: Sequence[WeightMeasure], sites: Mapping[str, WeightSite]) -> Iterator[RoleMeasure]:
    for role in get_args(WeightRole):
        held = [w for w in weights if role in w.roles]
        if not held:
            continue
        gains = [_gains(w, role, sites[w.parameter]) for w in held]
        moments = [w.moment for w in held if w.moment is not None]
        counts = Counter(name for w in held for name in w.recipes)
        kinds: Counter[Distribution] = Counter(w.distribution for w in held)
        yield RoleMeasure(
            role=role,
            weights=len(held),
            distributions=tuple(kind for kind, _ in kinds.most_common()),
            std=_spread(w.std for w in held),
            gain=_spread(gain for gain, _ in gains),
            gain_back=_spread(back for _, back in gains),
            moment=_spread(moments) if moments else None,
            recipes=tuple(name for name, count in counts.most_common() if count >= _ALL * len(held)),
        )


def _gains(weight: WeightMeasure, role: WeightRole, site: WeightSite) -> tuple[float, float]:
    """std · √fan_in and std · √fan_out; a table that is the head as well is a product there, from the features of its
    rows to the rows."""
    if role == "head" and site.kind == "embedding":
        return weight.std * site.shape[-1] ** 0.5, weight.std * site.shape[0] ** 0.5
    return weight.gain, weight.gain_back


def _spread(values: Iterable[float]) -> tuple[float, float, float]:
    ordered = sorted(values)
    return ordered[0], statistics.median(ordered), ordered[-1]
