"""What a configuration states and the model lacks, and DeepNorm in part (2xx)."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from normprobe.records import Anatomy
from tests.faults.edits import at, behind, module_at, parameter, passing, writing
from tests.faults.fault import Conditions, Fault, NotHereError, Site, fault
from tests.faults.operators.qk_norms import normed


@fault("norms on queries and keys lost, and stated", "NP212", "warning", normed, Conditions(states="qk_norm"))
def lost_norms(model: nn.Module, anatomy: Anatomy, site: Site) -> None:
    for one in normed(anatomy):
        for path in (one.detail.qk_norm.query, one.detail.qk_norm.key):
            passing(model, path)


def tied(anatomy: Anatomy) -> list[Site]:
    head = anatomy.head
    return [] if head is None or head.tied_to is None else [Site(head.path)]


@fault("the head untied from the embedding", "NP212", "warning", tied, Conditions(states="tied"))
def untied(model: nn.Module, anatomy: Anatomy, site: Site) -> None:
    """The head's module gets a copy of the weight, whichever of its names the Anatomy gives."""
    held = parameter(model, site.path)
    uses = [w.site.path for w in anatomy.weights if w.parameter == site.path]
    heads = [
        (m, n)
        for p, m in model.named_modules()
        for n, q in m.named_parameters(recurse=False)
        if q is held and p not in uses
    ]
    if not heads:
        raise NotHereError("the head is not a module of its own")
    for module, name in heads:
        setattr(module, name, nn.Parameter(held.detach().clone()))


def multiplied_branches(anatomy: Anatomy) -> list[Site]:
    return [
        Site(b.path, b) for s in anatomy.streams for b in s.branches if b.branch_scale.kind == "constant" and b.apart
    ]


@fault("the factor on one branch lost", "NP212", "warning", multiplied_branches, Conditions(states="branch_multiplier"))
def lost_factor(model: nn.Module, anatomy: Anatomy, site: Site) -> None:
    branch = site.detail

    def add(run: Any, *args: Any, **kwargs: Any) -> Any:
        operands = list(args)
        operands[1 - branch.trunk] = operands[1 - branch.trunk] / branch.branch_scale.value
        return run(*operands, **kwargs)

    at(model, branch.add, add)


def multiplied_entries(anatomy: Anatomy) -> list[Site]:
    return [
        Site(s.source, s) for s in anatomy.streams if s.source is not None and s.input_multiplier not in (None, 1.0)
    ]


@fault("the factor on embeddings lost", "NP212", "warning", multiplied_entries, Conditions(states="input_multiplier"))
def lost_multiplier(model: nn.Module, anatomy: Anatomy, site: Site) -> None:
    path = site.path.rpartition(".")[0] or "."
    behind(module_at(model, path), lambda x: x / site.detail.input_multiplier)


def headed(anatomy: Anatomy) -> list[Site]:
    return [] if anatomy.head is None or anatomy.head.logit_multiplier is None else [Site(anatomy.head.path)]


@fault("logits multiplied by another factor", "NP212", "warning", headed, Conditions(states="logit_multiplier"))
def other_logits(model: nn.Module, anatomy: Anatomy, site: Site) -> None:
    uses = [m for m in model.modules() if any(p is parameter(model, site.path) for p in m.parameters(recurse=False))]
    if not uses or isinstance(uses[-1], nn.Embedding):
        raise NotHereError("the head is not a module of its own")
    behind(uses[-1], lambda y: 3 * y)


# ---- DeepNorm


def sums_normed(anatomy: Anatomy) -> list[Site]:
    """Unscaled post-norm streams whose writes are operands of their own."""
    found = []
    for stream in anatomy.streams:
        plain = all(
            b.skip == "identity" and b.skip_scale == 1 and b.branch_scale.kind == "none" for b in stream.branches
        )
        apart = all(b.apart and b.writers for b in stream.branches)
        if (
            stream.placement == "post"
            and stream.topology == "ordinary"
            and plain
            and apart
            and len(stream.branches) > 3
        ):
            found.append(Site(stream.name, stream))
    return found


def multiply_trunk(model: nn.Module, branch: Any, factor: float) -> None:
    def add(run: Any, *args: Any, **kwargs: Any) -> Any:
        operands = list(args)
        operands[branch.trunk] = operands[branch.trunk] * factor
        return run(*operands, **kwargs)

    at(model, branch.add, add)


@fault("DeepNorm's factor in all layers but one", "NP211", "warning", sums_normed)
def uneven(model: nn.Module, anatomy: Anatomy, site: Site) -> None:
    branches = site.detail.branches
    if len({(b.add.path, b.add.op, b.add.ordinal) for b in branches}) < len(branches):
        raise NotHereError("layers share their modules")
    for branch in branches[:2] + branches[3:]:
        multiply_trunk(model, branch, len(branches) ** 0.25)


DRAWN = Conditions(level="forward")


@fault("DeepNorm's factor without its initialisation", "NP211", "warning", sums_normed, DRAWN)
def alpha_alone(model: nn.Module, anatomy: Anatomy, site: Site) -> None:
    branches = site.detail.branches
    sizes = {weight.parameter: weight for weight in anatomy.weights}
    for branch in {(b.add.path, b.add.op, b.add.ordinal): b for b in branches}.values():
        multiply_trunk(model, branch, len(branches) ** 0.25)
        with writing() as generator:
            for path in branch.writers:
                if path in sizes:
                    held, fans = parameter(model, path), sizes[path].fan_in + sizes[path].fan_out
                    held.copy_(torch.randn(held.shape, generator=generator) * (2 / fans) ** 0.5)


ALL: tuple[Fault, ...] = (
    lost_norms,
    untied,
    lost_factor,
    lost_multiplier,
    other_logits,
    uneven,
    alpha_alone,
)
