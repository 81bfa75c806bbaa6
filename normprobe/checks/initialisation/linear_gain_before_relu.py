"""NP601."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import final

from normprobe.checks.base import Outcome, Unit, limit, number
from normprobe.checks.initialisation.drawn import NEEDS, DrawnCheck
from normprobe.records import Finding, Fix, Initialisation, ReportData, Severity, WeightMeasure

_LINEAR = ("torch_default", "xavier", "lecun")  # the narrowest first
_WORDS: Mapping[str, str] = {"relu": "ReLU", "leaky_relu": "leaky ReLU", "gelu": "GELU", "silu": "SiLU"}


@final
@dataclass(frozen=True)
class LinearGainBeforeReLU(DrawnCheck):
    """Weights before a ReLU or its kin have the gain of a linear layer, and the signal fades.

    ## What it measures

    In rows of layers with nothing but activations between them, no norm, no sum with another signal and no factor:
    what layers before a ReLU, leaky ReLU, GELU or SiLU leave of the RMS of the signal, the product of √E[f(g z)²] over
    them for their gains g = std · √fan_in, functions f and z from N(0, 1). With Xavier's or LeCun's gain of 1 a layer
    before a ReLU leaves half of the variance, with that of torch's default a sixth; GELU and SiLU leave a little less
    the smaller their input is, so that the product is the most that is left. A note where it is torch's default,
    which many small models use on purpose or by habit, and that only in models without any norm or residual sum.

    ## Why it matters

    After ten layers a thirtieth of the signal is left, and as little of the gradient. Biases then decide the
    outputs, and training begins with a plateau.

    ## What to do

    `torch.nn.init.kaiming_normal_(weight, nonlinearity="relu")`, whose gain is √2, or with `nonlinearity="leaky_relu"`
    and its slope; or norms between the layers.

    ## When to ignore it

    When something that normprobe does not see as a norm restores the scale, or inputs are large on purpose.

    ## References

    He et al. 2015 (Delving Deep into Rectifiers), sec. 2.2, eq. 10; Glorot & Bengio 2010, sec. 4.2.1 (derived for
    functions that are linear around 0).
    """

    code, name, severity, since = "NP601", "linear-gain-before-relu", Severity.WARNING, "0.1.0"
    fixes = (Fix(rewrite="Initialise", settings={"scheme": "kaiming"}, at_places=True),)
    needs = NEEDS
    explains = "NP501", "NP502", "NP503"

    min_left: float = limit(
        0.2,
        unit=Unit.RATIO,
        source="choice: a fifth of the RMS is left; five ReLU layers of gain 1 leave 0.18",
    )

    def judge(self, init: Initialisation, data: ReportData) -> Outcome:
        """Yield one finding for all rows of layers that fade by one recipe."""
        sources = {site.parameter: site.source for site in data.anatomy.weights}
        fading = {w.parameter: w for w in init.weights if _fades(w)}
        found: dict[bool, list[list[WeightMeasure]]] = {}
        for row in _rows(fading, sources):
            if len(row) > 1 and self.exceeds(_left(row), least=self.min_left):  # one loses so much by no such recipe
                found.setdefault(_recipe(row) == "torch_default", []).append(row)
        if data.anatomy.streams or any(norm.executed for norm in data.anatomy.norms):
            found.pop(True, None)
        for default, rows in found.items():
            yield self._found(min(rows, key=_left), rows, Severity.NOTE if default else self.severity)

    def _found(self, worst: list[WeightMeasure], rows: list[list[WeightMeasure]], severity: Severity) -> Finding:
        functions = " or ".join(dict.fromkeys(_WORDS[w.followed_by] for w in worst))
        most = "at most " if {"gelu", "silu"} & {w.followed_by for w in worst} else ""
        others = f"; {len(rows)} rows of layers do so" if len(rows) > 1 else ""
        return self.finding(
            worst[0].parameter,
            f"{len(worst)} layers in a row before a {functions}, drawn by {_recipe(worst)}, leave {most}"
            f"{number(_left(worst))} of the signal's RMS{others}",
            value=_left(worst),
            against="min_left",
            severity=severity,
            places=[w.parameter for row in rows for w in row],
        )


def _fades(weight: WeightMeasure) -> bool:
    """Whether a weight loses scale behind its function, by a recipe for linear layers."""
    lost = weight.moment is not None and weight.moment < 1
    return lost and weight.followed_by in _WORDS and any(name in weight.recipes for name in _LINEAR)


def _rows(weights: dict[str, WeightMeasure], sources: dict[str, str | None]) -> Iterator[list[WeightMeasure]]:
    """The longest ways from weight to weight, each from its first to its last."""
    continued = {sources.get(name) for name in weights}
    for name in weights:
        row: list[WeightMeasure] = []
        at: str | None = None if name in continued else name
        while at is not None and at in weights:
            row.insert(0, weights[at])
            at = sources.get(at)
        if row:
            yield row


def _left(row: list[WeightMeasure]) -> float:
    """The share of the signal's RMS that these weights and what follows them leave."""
    return math.prod(math.sqrt(w.moment) for w in row if w.moment is not None)


def _recipe(row: list[WeightMeasure]) -> str:
    """The recipe that most fit; of several for a layer the one that names it most narrowly."""
    names = [next(name for name in _LINEAR if name in w.recipes) for w in row]
    return max(dict.fromkeys(names), key=names.count)
