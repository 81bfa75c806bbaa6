"""How the weights were drawn, as far as they show it."""

from __future__ import annotations

from typing import Literal

from normprobe.records.base import Record
from normprobe.records.basis import Basis
from normprobe.records.weights import Follower, WeightRole

Distribution = Literal["normal", "truncated_normal", "uniform", "orthogonal", "constant", "zero", "unknown"]


class WeightMeasure(Record):
    """One weight.

    Attributes:
        parameter, roles: as in `Anatomy.weights`.
        distribution: the one that the values fit, with all rows and columns alike; `unknown` where none does or there
            are too few values. Normals cut further out than the largest value can tell are `normal`.
        mean, std: of the values; the mean square root about zero where the distribution is known.
        interval: 99.9 % interval of the standard deviation that values like these were drawn with.
        gain: std · √fan_in: how much RMS a product of independent inputs gains.
        gain_back: std · √fan_out: the same for gradients on their way back.
        followed_by: what the product passes first in the graph, as in `Anatomy.weights`.
        moment: E[f(gain · z)²] with z from N(0, 1) and f what follows: the second moment that inputs of second moment 1
            have behind both; 1 keeps the scale (√2 before ReLU, He et al. 2015). None where f is no known function of
            one element.
        recipes: names of all recipes whose standard deviation lies in the interval (`normprobe.measures.recipes`);
            empty where none does, where the distribution is unknown, and for trained models.
        same_outputs: whether all outputs of the product are the same, with weights that are not 0 and get a gradient.
        repeated: how many outputs hold the same numbers, not all 0, as an earlier one that reads the same inputs; of
            weights that get a gradient.
        alike: how many of these get the same gradient as the output that they repeat; None where no gradient was taken,
            or all are 0.
        copies: of several matrices in one parameter (`experts`), how many are the same as an earlier one; 0 where each
            is of another layer.
        copy_of: an earlier weight of the same branch of experts that holds the same numbers; None where there is none.
        misread: names of the recipes by fan_in that fit only with another count than that of the summed inputs: with
            fan_out, or with what torch's initialisers take for fan_in from the shape. Empty where any of `recipes` but
            Kaiming's by fan_out fits.
        own: standard deviation and 99.9 % interval of the same weight in a fresh instance of the model's class with its
            configuration; None where none was built.
        basis: of mean and std.
    """

    parameter: str
    roles: tuple[WeightRole, ...]
    distribution: Distribution
    mean: float
    std: float
    interval: tuple[float, float]
    gain: float
    gain_back: float
    followed_by: Follower
    moment: float | None
    recipes: tuple[str, ...]
    same_outputs: bool = False
    repeated: int = 0
    alike: int | None = None
    copies: int = 0
    copy_of: str | None = None
    misread: tuple[str, ...] = ()
    own: tuple[float, tuple[float, float]] | None = None
    basis: Basis


class BlockedBranch(Record):
    """Weights, factors and gains of a branch that are 0 and that no gradient reaches, now or later: `zeros`. Of those
    in no branch, `stream` and `branch` are None and `path` is the module that holds them."""

    stream: str | None = None
    branch: int | None = None
    path: str
    zeros: tuple[str, ...]


class RoleMeasure(Record):
    """All weights of one role.

    Attributes:
        weights: how many.
        distributions: those found, the most frequent first.
        std: smallest, median and largest standard deviation.
        gain, gain_back: the same of std · √fan_in and std · √fan_out.
        moment: the same of `WeightMeasure.moment`, over the weights that have it; None where none has.
        recipes: those that fit every weight of the role but one in twenty, the most frequent first; empty where none
            does.
    """

    role: WeightRole
    weights: int
    distributions: tuple[Distribution, ...]
    std: tuple[float, float, float]
    gain: tuple[float, float, float]
    gain_back: tuple[float, float, float]
    moment: tuple[float, float, float] | None
    recipes: tuple[str, ...]


class Initialisation(Record):
    """How the weights were drawn.

    Attributes:
        trained: True where norms have moved from their start and weights fit no distribution that one draws from,
            False where the opposite holds for both, None where they disagree or tell nothing.
        drawn: share of the weights that fit a distribution that one draws from, of those that have one or enough values
            to tell that they have none; None without such a weight.
        evidence: what `trained` was read from.
        blocked: branches whose weights get no gradient; looked for where the weights do not look trained.
        closed: branches that get no gradient before zeros elsewhere have moved, which do get one (a gate that another
            input makes, from weights of zeros): the stream, and the index of the branch there.
        own_reason: why no fresh instance of the model's class was built; empty where one was, or where the class does
            not say what it is built with.
        writes: how many branches write to each stream: the N of 1/√N, 1/√(2L) for L layers of two branches.
    """

    trained: bool | None
    drawn: float | None = None
    evidence: tuple[str, ...]
    blocked: tuple[BlockedBranch, ...] = ()
    closed: tuple[tuple[str, int], ...] = ()
    own_reason: str = ""
    writes: tuple[int, ...]
    roles: tuple[RoleMeasure, ...]
    weights: tuple[WeightMeasure, ...]
