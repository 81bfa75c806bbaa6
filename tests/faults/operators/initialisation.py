"""Weights that are drawn wrongly (6xx)."""

from __future__ import annotations

import torch
from torch import nn

from normprobe.records import Anatomy, WeightSite
from tests.faults.edits import parameter, writing
from tests.faults.fault import Conditions, Fault, NotHereError, Site, fault

FORWARD = Conditions(level="forward")
BACKWARD = Conditions(level="backward")


def weights(anatomy: Anatomy, *roles: str) -> list[WeightSite]:
    """Weights of one axis of inputs and one of outputs, with one of these roles."""
    held = [w for w in anatomy.weights if w.kind == "linear" and len(w.shape) == 2 and len(w.roles) == 1]
    return [w for w in held if set(w.roles) & set(roles) and min(w.shape) > 7]


def redraw(model: nn.Module, sites: list[WeightSite], std: float | None = None, factor: float = 1.0) -> None:
    """Normal weights of this standard deviation, or of theirs times `factor`."""
    with writing() as generator:
        for site in sites:
            held = parameter(model, site.parameter)
            size = float(held.std()) * factor if std is None else std
            held.copy_(torch.randn(held.shape, generator=generator) * size)


# ---- layers behind each other without norms


def before_relu(anatomy: Anatomy) -> list[Site]:
    """The first of five or more layers before a ReLU, in a model of nothing else."""
    bare = not anatomy.streams and not any(norm.executed for norm in anatomy.norms)
    found = [w for w in anatomy.weights if w.followed_by == "relu"]
    return [Site(found[0].parameter, found)] if bare and len(found) > 4 else []


@fault("Xavier's gain before ReLU", "NP601", "warning", before_relu, FORWARD)
def xavier(model: nn.Module, anatomy: Anatomy, site: Site) -> None:
    for one in site.detail:
        redraw(model, [one], (2 / (one.fan_in + one.fan_out)) ** 0.5)


# ---- streams


def deep(anatomy: Anatomy) -> list[Site]:
    """Streams of 24 writes or more whose sums are not normed."""
    found = []
    for index, stream in enumerate(anatomy.streams):
        if len(stream.branches) >= 24 and stream.placement not in ("post", "deepnorm"):
            found.append(Site(stream.name, index))
    return found


@fault("writers drawn like readers in a deep stack", "NP602", "note", deep, FORWARD)
def unscaled(model: nn.Module, anatomy: Anatomy, site: Site) -> None:
    held = [w for w in anatomy.weights if w.stream == site.detail and set(w.roles) & {"reader", "writer", "inner"}]
    redraw(model, held, 0.02)


def writers(anatomy: Anatomy) -> list[Site]:
    """One of the weights that write, where there are several of 256 numbers or more."""
    found = [w for w in weights(anatomy, "writer") if w.shape[0] * w.shape[1] >= 256]
    return [Site(found[0].parameter, found)] if len(found) > 1 else []


@fault("writers drawn three times as large as the class draws them", "NP603", "warning", writers, FORWARD)
def another_recipe(model: nn.Module, anatomy: Anatomy, site: Site) -> None:
    if getattr(model, "config", None) is None:
        raise NotHereError("the model has no configuration to be built from")
    redraw(model, site.detail, factor=3.0)


def stored_inputs_first(anatomy: Anatomy) -> list[Site]:
    """Weights of one role that are stored as [in, out], of unlike sides."""
    for role in ("reader", "writer"):
        found = [w for w in weights(anatomy, role) if w.output_axis == 1]
        found = [w for w in found if max(w.shape) >= 3 * min(w.shape) and w.shape[0] * w.shape[1] >= 1024]
        if len(found) > 2:
            return [Site(found[0].parameter, found)]
    return []


@fault("Kaiming's recipe on weights stored as [in, out]", "NP604", "warning", stored_inputs_first, FORWARD, ("NP603",))
def other_fan(model: nn.Module, anatomy: Anatomy, site: Site) -> None:
    for one in site.detail:
        redraw(model, [one], (2 / one.shape[1]) ** 0.5)


# ---- single weights


def products(anatomy: Anatomy) -> list[Site]:
    return [Site(w.parameter) for w in weights(anatomy, "reader", "writer", "inner")]


@fault("a weight of one constant", "NP605", "warning", products, FORWARD, ("NP305", "NP603"))
def constant(model: nn.Module, anatomy: Anatomy, site: Site) -> None:
    with writing():
        parameter(model, site.path).fill_(0.02)


def read_alone(anatomy: Anatomy) -> list[Site]:
    """Weights whose product, an activation passed, goes to another weight as it is, with that one; branches that start
    closed are left out, as no gradient tells there."""
    closed = {
        (i, k)
        for i, stream in enumerate(anatomy.streams)
        for k, branch in enumerate(stream.branches)
        if branch.branch_scale.value == 0
    }
    held = [w for w in weights(anatomy, "reader", "inner", "other") if (w.stream, w.branch) not in closed]
    known = {w.parameter: w for w in held}
    found = []
    for reader in weights(anatomy, "writer", "inner", "other", "head"):
        made = known.get(reader.source or "")
        if made is not None and made.fan_out == reader.fan_in:
            found.append(Site(made.parameter, (made, reader)))
    return found


def doubled(model: nn.Module, site: WeightSite, axis: int) -> None:
    """The second half of a weight's outputs, or inputs, a copy of the first."""
    held = parameter(model, site.parameter)
    half = held.shape[axis] // 2
    with writing():
        held.narrow(axis, half, half).copy_(held.narrow(axis, 0, half))


@fault("half of the outputs and their readers copied", "NP605", "warning", read_alone, BACKWARD, ("NP603",))
def symmetric(model: nn.Module, anatomy: Anatomy, site: Site) -> None:
    made, reader = site.detail
    doubled(model, made, made.output_axis)
    doubled(model, reader, 1 - reader.output_axis)
    path = site.path.rpartition(".")[0]
    for bias in (p for p in model.get_submodule(path).parameters(recurse=False) if p.dim() == 1):
        with writing():
            bias[len(bias) // 2 :].copy_(bias[: len(bias) // 2])


@fault("half of the outputs copied", "NP605", "note", read_alone, FORWARD, ("NP603",))
def repeated(model: nn.Module, anatomy: Anatomy, site: Site) -> None:
    doubled(model, site.detail[0], site.detail[0].output_axis)


def blockable(anatomy: Anatomy) -> list[Site]:
    """Branches whose readers and writers are their own, with no bias that could begin to learn."""
    found, computed = [], {one.parameter for one in anatomy.reparametrizations}
    for stream in anatomy.streams:
        for branch in stream.branches:
            others = {path for other in stream.branches if other is not branch for path in other.parameters}
            own = not (others | computed) & {*branch.readers, *branch.writers}
            if branch.readers and branch.writers and own and not set(branch.readers) & set(branch.writers):
                found.append(Site(branch.path, branch))
    return found


@fault("what a branch reads by and writes by both zeros", "NP606", "error", blockable, FORWARD)
def blocked(model: nn.Module, anatomy: Anatomy, site: Site) -> None:
    with writing():
        for path in (*site.detail.readers, *site.detail.writers):
            parameter(model, path).zero_()


ALL: tuple[Fault, ...] = (xavier, unscaled, another_recipe, other_fan, constant, symmetric, repeated, blocked)
