"""Schemes of initialisation: from which distribution each weight is drawn anew, by its place in the data flow."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Literal

from normprobe.errors import RewriteError
from normprobe.measures.activations import second_moment
from normprobe.measures.recipes import Drawn
from normprobe.records.weights import Follower
from normprobe.rewrites.initialise.stacks import PartName
from normprobe.theory import kaiming_std, lecun_std, xavier_std

Distribution = Literal["normal", "uniform", "orthogonal", "zero"]
_TANH = 5 / 3  # gain that torch.nn.init.calculate_gain gives tanh, whose second moment no gain can keep at 1
_LARGEST = 10.0  # of a gain that is searched


@dataclass(frozen=True)
class Draw:
    """How a weight is drawn: `std` is the standard deviation, of an orthogonal matrix the factor on it."""

    distribution: Distribution
    std: float = 0.0

    def __str__(self) -> str:
        if self.distribution == "zero":
            return "0"
        what = "factor" if self.distribution == "orthogonal" else "std"
        return f"{self.distribution}, {what} {self.std:.4g}"


@dataclass(frozen=True)
class Weight:
    """A weight that is to be drawn.

    Attributes:
        drawn: fans, roles and place in its stream.
        followed_by: the function that its product passes next.
        part: what it makes of an attention, where that is known.
        beta: DeepNorm's β of its stream; None outside the branches of one.
        t_fixup: T-Fixup's factor of its stream; None outside the branches of one.
    """

    drawn: Drawn
    followed_by: Follower
    part: PartName | None = None
    beta: float | None = None
    t_fixup: float | None = None


@dataclass(frozen=True)
class Scheme:
    """One initialisation; `draw` gives None for a weight that it leaves as it is.

    Attributes:
        name: as `Initialise.scheme`.
        about: the rule in a few words.
        source: paper and section.
        parted: whether it draws queries and keys otherwise than values, so that these have to be told apart.
    """

    name: str
    about: str
    source: str
    draw: Callable[[Weight], Draw | None]
    parted: bool = False


def _gpt2(weight: Weight) -> Draw:
    return Draw("normal", 0.02 / _root(weight))


def _root(weight: Weight) -> float:
    """√N for a weight that writes to a stream of N writes, else 1."""
    return math.sqrt(weight.drawn.writes) if weight.drawn.has("writer") and weight.drawn.writes else 1.0


def _table(weight: Weight) -> Draw | None:
    """Tables of rows get 1 / √width, so that a row has length 1; None for other weights."""
    return Draw("normal", lecun_std(weight.drawn.fan_out)) if weight.drawn.table else None


def _xavier(weight: Weight) -> Draw:
    return _table(weight) or Draw("uniform", xavier_std(weight.drawn.fan_in, weight.drawn.fan_out))


def _kaiming(weight: Weight) -> Draw:
    return _table(weight) or Draw("normal", kaiming_gain(weight.followed_by) * lecun_std(weight.drawn.fan_in))


@cache
def kaiming_gain(follower: Follower) -> float:
    """The g of std = g / √fan_in for which E[f(g z)²] = 1, z from N(0, 1): √2 for ReLU, 1 without a function.

    GELU and SiLU by bisection; 5/3 for tanh as torch has it, since no gain keeps its second moment at 1; 1 for what is
    no function of one element (gate, softmax, norm) or is unknown.

    Source: He et al. 2015, sec. 2.2.
    """
    if follower == "tanh":
        return _TANH
    if follower == "relu":
        return kaiming_std(1)
    if follower not in ("gelu", "silu"):
        return 1.0
    low, high = 1.0, _LARGEST
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if (second_moment(follower, middle) or 0.0) < 1 else (low, middle)
    return low


def _lecun(weight: Weight) -> Draw:
    return _table(weight) or Draw("normal", lecun_std(weight.drawn.fan_in))


def _orthogonal(weight: Weight) -> Draw:
    return _table(weight) or Draw("orthogonal", 1.0)


def _deepnorm(weight: Weight) -> Draw | None:
    if weight.beta is None:
        return None
    beta = 1.0 if weight.part in ("q", "k") else weight.beta
    return Draw("normal", beta * xavier_std(weight.drawn.fan_in, weight.drawn.fan_out))


def _small(weight: Weight) -> Draw:
    drawn = weight.drawn
    if drawn.has("writer") and drawn.blocks and drawn.width:
        return Draw("normal", 2 / (drawn.blocks * math.sqrt(drawn.width)))
    return Draw("normal", math.sqrt(2 / (5 * (drawn.width or drawn.fan_in))))


def _fixup(weight: Weight) -> Draw | None:
    """Writers and head 0, inside branches of m weights Kaiming's × writes^(−1/(2m − 2)); tables stay as they are."""
    drawn = weight.drawn
    if drawn.has("writer", "head") and not drawn.table:
        return Draw("zero")
    inside = drawn.has("reader", "inner") and drawn.writes > 0 and drawn.depth > 1
    factor = drawn.writes ** (-1 / (2 * drawn.depth - 2)) if inside else 1.0
    return None if drawn.table else Draw("normal", factor * kaiming_gain(weight.followed_by) * lecun_std(drawn.fan_in))


def _t_fixup(weight: Weight) -> Draw:
    """√(2 / (fan-in + fan-out)), in tables and branches but for queries and keys × 0.67 L^(−1/4) for L layers, in a
    decoder that attends to an encoder (9 L)^(−1/4)."""
    factor = 1.0 if weight.t_fixup is None or weight.part in ("q", "k") else weight.t_fixup
    if weight.drawn.table:
        return Draw("normal", factor * lecun_std(weight.drawn.fan_out))
    return Draw("normal", factor * xavier_std(weight.drawn.fan_in, weight.drawn.fan_out))


def _zero(weight: Weight) -> Draw | None:
    return Draw("zero") if weight.drawn.has("writer") else None


SCHEMES: Mapping[str, Scheme] = {
    scheme.name: scheme
    for scheme in (
        Scheme("gpt2", "0.02, writers 0.02 / √(number of writes)", "Radford et al. 2019, sec. 2.3", _gpt2),
        Scheme("xavier", "uniform, √(2 / (fan-in + fan-out))", "Glorot & Bengio 2010, eq. 16", _xavier),
        Scheme("kaiming", "gain of the function that follows / √fan-in", "He et al. 2015, eq. 10", _kaiming),
        Scheme("lecun", "1 / √fan-in", "LeCun et al. 1998, sec. 4.6", _lecun),
        Scheme("orthogonal", "orthogonal rows or columns", "Saxe et al. 2014", _orthogonal),
        Scheme(
            "deepnorm",
            "β √(2 / (fan-in + fan-out)) in branches, on q and k without β",
            "Wang et al. 2022, fig. 2",
            _deepnorm,
            parted=True,
        ),
        Scheme(
            "small",
            "√(2/(5 width)), writers 2/(blocks √width)",
            "Nguyen & Salazar 2019; Wang & Komatsuzaki 2021",
            _small,
        ),
        Scheme(
            "fixup",
            "writers, head 0; inside kaiming × writes^(−1/(2m − 2))",
            "Zhang, Dauphin & Ma 2019, sec. 3",
            _fixup,
        ),
        Scheme(
            "t_fixup",
            "xavier's std, most × 0.67 L^(−1/4) or (9 L)^(−1/4)",
            "Huang et al. 2020, sec. 3.2",
            _t_fixup,
            parted=True,
        ),
        Scheme("zero_writers", "writers 0, all else as it is", "Zhang, Dauphin & Ma 2019 (Fixup)", _zero),
    )
}


def scheme(name: str) -> Scheme:
    """The scheme of this name.

    Raises:
        RewriteError: there is none.
    """
    if name not in SCHEMES:
        raise RewriteError("Initialise cannot be made", expected=f"scheme: {' | '.join(SCHEMES)}", found=repr(name))
    return SCHEMES[name]
