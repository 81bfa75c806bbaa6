"""Recipes of initialisation: the standard deviation that each gives a weight, with its source.

Symbols: fan_in and fan_out as in `WeightSite`, d width of the stream, N writes to it, L its blocks, l the number of a
block from 1. A weight of nothing but zeros is called `zero` (the last of a branch in Zhang, Dauphin & Ma 2019).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from normprobe.records.anatomy import Anatomy
from normprobe.records.init import Distribution
from normprobe.records.weights import WeightRole, WeightSite
from normprobe.theory import deepnorm, kaiming_std, lecun_std, xavier_std


@dataclass(frozen=True)
class Drawn:
    """What a recipe may depend on.

    Attributes:
        fan_in, fan_out: those of the weight.
        roles: those of the weight.
        table: whether it is one of rows that are looked up.
        distribution: what its values fit.
        width, writes, blocks: of its stream; 0 where it has none.
        block: number of its block in the stream from 1; 0 where it is in none.
        depth: weights on the way through its branch.
        longest: the longer side of the weight as a matrix of one row for each index of its first axis.
    """

    fan_in: int
    fan_out: int
    roles: tuple[WeightRole, ...]
    table: bool
    distribution: Distribution
    width: int = 0
    writes: int = 0
    blocks: int = 0
    block: int = 0
    depth: int = 0
    longest: int = 0

    @classmethod
    def of(cls, site: WeightSite, anatomy: Anatomy, fans: tuple[int, int], distribution: Distribution) -> Drawn:
        """What is known of a weight of `anatomy`, with the fan-in and fan-out that it was given."""
        rows = site.shape[0] if site.kind == "conv" else math.prod(site.shape[:-1])
        longest = max(rows, math.prod(site.shape) // rows)
        drawn = cls(*fans, site.roles, site.kind == "embedding", distribution, longest=longest)
        if site.stream is None:
            return drawn
        stream = anatomy.streams[site.stream]
        blocks = list(dict.fromkeys((branch.block, branch.layer) for branch in stream.branches))
        drawn = replace(drawn, width=stream.width or 0, writes=len(stream.branches), blocks=len(blocks))
        if site.branch is None:
            return drawn
        depth = sum(w.stream == site.stream and w.branch == site.branch for w in anatomy.weights)
        own = stream.branches[site.branch]
        return replace(drawn, block=blocks.index((own.block, own.layer)) + 1, depth=depth)

    def has(self, *roles: WeightRole) -> bool:
        """Whether the weight has one of these roles."""
        return not set(roles).isdisjoint(self.roles)


Std = Callable[[Drawn], "float | None"]


@dataclass(frozen=True)
class Recipe:
    """One recipe: `std` gives None for a weight that it says nothing about."""

    name: str
    formula: str
    source: str
    std: Std


def _xavier(w: Drawn) -> float:
    return xavier_std(w.fan_in, w.fan_out)


def _only(std: Std, *roles: WeightRole, distribution: Distribution | None = None) -> Std:
    """A recipe for products of these roles and this distribution alone."""

    def given(w: Drawn) -> float | None:
        return std(w) if w.has(*roles) and not w.table and distribution in (None, w.distribution) else None

    return given


def _deepnorm(w: Drawn) -> float | None:
    layers = w.writes // 2
    return _xavier(w) * deepnorm("encoder", encoder_layers=layers)["encoder"].beta if layers else None


def _fixup(w: Drawn) -> float | None:
    if w.writes < 2 or w.depth < 2:
        return None
    return float(kaiming_std(w.fan_in) * w.writes ** (-1 / (2 * w.depth - 2)))


def _per_layer(of: Callable[[int], float]) -> Std:
    return lambda w: _xavier(w) * of(w.blocks) if w.blocks > 1 else None


def _written(std: Std) -> Std:
    """A recipe divided by √N for the weights that write to a stream."""

    def divided(w: Drawn) -> float | None:
        whole = std(w)
        return None if whole is None or w.writes < 2 else whole / math.sqrt(w.writes)

    return _only(divided, "writer")


def _fixed(value: float) -> Std:
    return lambda w: value


_BRANCH: tuple[WeightRole, ...] = ("reader", "writer", "inner")
RECIPES = (
    Recipe("lecun", "√(1 / fan_in)", "LeCun et al. 1998, sec. 4.6", lambda w: lecun_std(w.fan_in)),
    Recipe("xavier", "√(2 / (fan_in + fan_out))", "Glorot & Bengio 2010, eq. 16", _xavier),
    Recipe("kaiming", "√(2 / fan_in)", "He et al. 2015, eq. 10", lambda w: kaiming_std(w.fan_in)),
    Recipe("kaiming_fan_out", "√(2 / fan_out)", "He et al. 2015, eq. 14", lambda w: kaiming_std(w.fan_out)),
    Recipe(
        "torch_default",
        "uniform, √(1 / (3 fan_in))",
        "torch.nn.Linear and convolutions: kaiming_uniform_ with a = √5",
        lambda w: kaiming_std(w.fan_in, math.sqrt(5)) if w.distribution == "uniform" else None,
    ),
    Recipe("fixed_1", "1", "torch.nn.Embedding", lambda w: 1.0 if w.table else None),
    Recipe("fixed_0.02", "0.02", "Radford et al. 2018, sec. 4.1; Devlin et al. 2018 (released code)", _fixed(0.02)),
    Recipe("fixed_0.01", "0.01", "Krizhevsky et al. 2012, sec. 5", _fixed(0.01)),
    Recipe("fixed_0.006", "0.006", "DeepSeek-AI 2024 (V3), sec. 4.2", _fixed(0.006)),
    Recipe("gpt2_depth", "0.02 / √N", "Radford et al. 2019, sec. 2.3", _written(_fixed(0.02))),
    Recipe("lecun_depth", "√(1 / fan_in) / √N", "as gpt2_depth", _written(lambda w: lecun_std(w.fan_in))),
    Recipe("xavier_depth", "√(2 / (fan_in + fan_out)) / √N", "as gpt2_depth", _written(_xavier)),
    Recipe(
        "ds_init",
        "√(2 / (fan_in + fan_out)) / √l",
        "Zhang, Titov & Sennrich 2019 (DS-Init)",
        _only(lambda w: _xavier(w) / math.sqrt(w.block) if w.block else None, *_BRANCH, distribution="uniform"),
    ),
    Recipe("deepnorm", "β √(2 / (fan_in + fan_out))", "Wang et al. 2022, fig. 2", _only(_deepnorm, *_BRANCH)),
    Recipe(
        "t_fixup_encoder",
        "0.67 L^(−1/4) √(2 / (fan_in + fan_out))",
        "Huang et al. 2020 (T-Fixup)",
        _only(_per_layer(lambda n: 0.67 * n**-0.25), *_BRANCH),
    ),
    Recipe(
        "t_fixup_decoder",
        "(9 L)^(−1/4) √(2 / (fan_in + fan_out))",
        "Huang et al. 2020 (T-Fixup)",
        _only(_per_layer(lambda n: (9 * n) ** -0.25), *_BRANCH),
    ),
    Recipe(
        "fixup", "N^(−1/(2m − 2)) √(2 / fan_in)", "Zhang, Dauphin & Ma 2019 (Fixup)", _only(_fixup, "reader", "inner")
    ),
    Recipe(
        "small_init",
        "√(2 / (5 d))",
        "Nguyen & Salazar 2019 (SmallInit)",
        lambda w: math.sqrt(2 / (5 * w.width)) if w.width else None,
    ),
    Recipe(
        "wang_init",
        "2 / (L √d)",
        "Wang & Komatsuzaki 2021, as cited by Black et al. 2022 (GPT-NeoX-20B)",
        _only(lambda w: 2 / (w.blocks * math.sqrt(w.width)) if w.blocks > 1 and w.width else None, "writer"),
    ),
    Recipe("mup_head", "1 / fan_in", "Yang et al. 2022, table 3", lambda w: 1 / w.fan_in if w.has("head") else None),
)
ORTHOGONAL = (
    Recipe("orthogonal", "orthogonal rows or columns, gain 1", "Saxe et al. 2014", lambda w: w.longest**-0.5),
    Recipe("orthogonal_relu", "the same, gain √2", "Saxe et al. 2014", lambda w: (2 / w.longest) ** 0.5),
)


def recipes(weights: tuple[Drawn, ...], interval: tuple[float, float], cut: float | None) -> tuple[str, ...]:
    """The names of all recipes whose standard deviation lies in an interval.

    Args:
        weights: the weight, with each pair of fans that the recipe may have been given.
        interval: of the standard deviation.
        cut: of a truncated normal distribution, where it ends: recipes that do not make up for the cut are meant too.
    """
    distribution = weights[0].distribution
    if distribution in ("zero", "constant", "unknown"):
        return ("zero",) if distribution == "zero" else ()
    known = ORTHOGONAL if distribution == "orthogonal" else RECIPES
    factors = (1.0,) if cut is None else (1.0, truncated_std(cut))
    found = (r.name for r in known if any(_within(std * f, interval) for std in _stds(r, weights) for f in factors))
    return tuple(dict.fromkeys(found))


def _stds(recipe: Recipe, weights: tuple[Drawn, ...]) -> Iterator[float]:
    yield from (std for std in map(recipe.std, weights) if std is not None)


def _within(std: float, interval: tuple[float, float]) -> bool:
    return interval[0] <= std <= interval[1]


def truncated_std(cut: float) -> float:
    """Standard deviation of a unit normal that is cut off at ±cut: √(1 − 2c·φ(c) / (2Φ(c) − 1)).

    Source: Johnson, Kotz & Balakrishnan 1994, sec. 13.10.1.
    """
    inside = math.erf(cut / math.sqrt(2))
    return math.sqrt(1 - 2 * cut * math.exp(-(cut**2) / 2) / math.sqrt(2 * math.pi) / inside)
