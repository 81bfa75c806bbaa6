"""What a sweep over widths or depths found."""

from __future__ import annotations

from typing import Literal

from normprobe.records.base import Record
from normprobe.records.report import Finding, Ignored, Skipped

Axis = Literal["width", "depth"]
Optimizer = Literal["adam", "sgd"]
Parametrisation = Literal["standard", "mup"]
ScaleVerdict = Literal["constant", "growing", "vanishing", "shrinking", "unknown"]
SLOPE_LIMIT = 0.25  # choice: halfway to 1/2, the smallest exponent that theory knows


class ModuleScale(Record):
    """How the output of one module scales.

    Attributes:
        path: the module.
        activation: RMS over all entries of its output after the steps, one number a size. A factor that `MuP` put on
            queries is left out: it is part of the scale of attention.
        update: RMS of the change of that output since before the first step, on the same inputs.
        activation_slope, update_slope: least-squares slope of ln RMS against ln size; NaN where one is 0 or not finite.
        verdict: with the limit `SLOPE_LIMIT`, a choice: "growing" where either slope is above it; else "vanishing"
            where the update's is below its negative; else "shrinking" where the activation's is, while the update is
            Θ(1); else "constant", Θ(1). "unknown" where the update has no slope. Under muP the readout and what follows
            it are expected to shrink: they start at width^(-1/2), and only their update is Θ(1).
    """

    path: str
    activation: tuple[float, ...]
    update: tuple[float, ...]
    activation_slope: float
    update_slope: float
    verdict: ScaleVerdict


class LearningRates(Record):
    """Loss after the steps by learning rate (`losses[size][rate]`), and the best rate of each size.

    A loss that is not finite stands as infinite; `best` is NaN where all are.
    """

    rates: tuple[float, ...]
    losses: tuple[tuple[float, ...], ...]
    best: tuple[float, ...]


class Sweep(Record):
    """The same model at several sizes under one parametrisation, after a few steps on one batch."""

    parametrisation: Parametrisation
    modules: tuple[ModuleScale, ...]
    rates: LearningRates | None = None


class SweepReport(Record):
    """A whole sweep.

    Attributes:
        axis: what is varied.
        sizes: its values, ascending.
        steps: optimiser steps, without weight decay, in eval mode, float32 or as the model is.
        optimizer: what takes them: Adam, or SGD without momentum.
        lr: learning rate of the coordinate check, at the smallest size.
        loss: what the steps lower, by name.
        slope_limit: of the verdicts.
        seed: of initialisation and inputs.
        sweeps: standard parametrisation, and for widths muP (Yang et al. 2022, table 3 and appendix D.1); muP alone
            where the models are in it already.
        notes: what could not be told, such as the role of a parameter.
        checks: codes of the checks that judged it; `findings`, `ignored` and `skipped` are what they said, as in a
            report.
    """

    axis: Axis
    sizes: tuple[int, ...]
    steps: int
    optimizer: Optimizer = "adam"
    lr: float
    loss: str
    slope_limit: float = SLOPE_LIMIT
    seed: int
    sweeps: tuple[Sweep, ...]
    notes: tuple[str, ...] = ()
    checks: tuple[str, ...] = ()
    findings: tuple[Finding, ...] = ()
    ignored: tuple[Ignored, ...] = ()
    skipped: tuple[Skipped, ...] = ()
