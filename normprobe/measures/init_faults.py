"""What keeps drawn weights from learning, or shows that another recipe was meant."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from normprobe.measures.draws import Fit
from normprobe.measures.recipes import Drawn, recipes
from normprobe.measures.values import plain
from normprobe.records import Anatomy, Branch, WeightSite
from normprobe.records.init import BlockedBranch
from normprobe.records.weights import Follower

_DRAWN = ("normal", "truncated_normal", "uniform")
_BY_FAN = ("lecun", "kaiming", "torch_default")
_THROUGH_ZERO: frozenset[Follower] = frozenset({"relu", "leaky_relu", "gelu", "silu", "tanh", "gate", "none"})


def same_outputs(parameter: Tensor, site: WeightSite) -> bool:
    """Whether a product gives the same in all its outputs, so that they get the same gradient and never part."""
    if site.kind not in ("linear", "conv") or site.shape[site.output_axis] < 2:
        return False
    first = parameter.narrow(site.output_axis, 0, 1)
    some = parameter.narrow(site.output_axis, 1, 1)
    return bool((some == first).all()) and bool((parameter == first).all()) and bool(first.any())


def misread(site: WeightSite, found: Fit) -> tuple[str, ...]:
    """The recipes by fan_in that fit with another count than the inputs that are summed over: the outputs, or what
    torch's initialisers count from the shape, whose second axis and all behind it they take for the inputs. A count of
    1 is none: what fits it was drawn with a standard deviation of about 1, as plain draws are."""
    if site.kind == "embedding" or len(site.shape) < 2 or found.distribution not in _DRAWN:
        return ()
    counted = math.prod(site.shape[1:])
    wrong = {site.fan_out, counted} - {site.fan_in, 1}
    drawn = tuple(Drawn(fan, fan, (), False, found.distribution) for fan in wrong)
    if not drawn:
        return ()
    return tuple(name for name in recipes(drawn, found.interval, found.cut) if name in _BY_FAN)


def blocked(anatomy: Anatomy, named: Mapping[str, Tensor]) -> Iterator[BlockedBranch]:
    """Branches with two factors in a row that are 0, each of which takes the gradient from the other."""
    followers = {weight.parameter: weight.followed_by for weight in anatomy.weights}
    for stream in anatomy.streams:
        for index, branch in enumerate(stream.branches):
            factors = [*_ends(branch, named, followers), *_scales(branch, named, anatomy)]
            if len(factors) > 1:
                yield BlockedBranch(stream=stream.name, branch=index, path=branch.path, zeros=tuple(factors))


def _ends(branch: Branch, named: Mapping[str, Tensor], followers: Mapping[str, Follower]) -> Iterator[str]:
    """The readers and the writers, where all weights and biases among them are 0."""
    through = all(followers.get(name, "none") in _THROUGH_ZERO for name in branch.readers)
    if through and not set(branch.readers) & set(branch.writers) and _zero(branch.readers, named):
        yield _largest(branch.readers, named)
    if _zero(branch.writers, named):
        yield _largest(branch.writers, named)


def _largest(names: Sequence[str], named: Mapping[str, Tensor]) -> str:
    return max(names, key=lambda name: named[name].numel())


def _scales(branch: Branch, named: Mapping[str, Tensor], anatomy: Anatomy) -> Iterator[str]:
    """The norm on the branch, and the factor on it, where these are 0."""
    norm = anatomy.norm(branch.output_norm) if branch.output_norm is not None else None
    plainly = norm is not None and norm.affine in ("weight", "weight+bias")
    names = [name for name in (norm.weight, norm.bias) if name is not None] if norm is not None and plainly else []
    if _zero(names, named):
        yield names[0]
    scale = branch.branch_scale
    if scale.kind in ("scalar", "channel") and scale.parameter is not None and _zero([scale.parameter], named):
        yield scale.parameter


def _zero(names: Sequence[str], named: Mapping[str, Tensor]) -> bool:
    found = [named.get(name) for name in names]
    return bool(found) and all(plain(p) and not bool(torch.count_nonzero(p)) for p in found)
