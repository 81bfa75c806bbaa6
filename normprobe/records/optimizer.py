"""What an optimiser does to the gains and offsets of the norms."""

from __future__ import annotations

from typing import Literal

from normprobe.records.base import Record


class OptimizerGroup(Record):
    """One group of parameters, as copies of the optimiser treated elements of 1 in float32.

    Attributes:
        lr: its learning rate; where a schedule has lowered it, the one that the schedule started from.
        weight_decay: what the group says; None where it says nothing.
        decay: share of an element that one step takes off where the gradient is 0; None where no copy ran.
        step: size of the first step, where gradients of any size give the same one (Adam, Lion); else None.
        reason: why `step` is None; empty where it is not.
    """

    lr: float | None
    weight_decay: float | None
    decay: float | None
    step: float | None
    reason: str


class NormStep(Record):
    """One gain or offset that the optimiser trains.

    Attributes:
        path: of the first norm that uses it.
        parameter: its name.
        one_plus: whether it is a gain applied as 1 + w.
        group: index into `OptimizerMeasure.groups`.
        dtype: that it is stored and stepped in.
        step: median size of the steps of its elements that take one: the one of the group, or where that follows the
            gradient what the gradient of the measured loss makes, at level "backward"; None where it is not known.
        lost: share of these elements that such a step leaves as they are, up and down; 0 where the optimiser keeps what
            rounding takes (a copy in float32, compensation, stochastic rounding); None where the size is not known or
            the model holds no values.
    """

    path: str
    parameter: str
    part: Literal["gain", "offset"]
    one_plus: bool
    group: int
    dtype: str
    step: float | None
    lost: float | None


class OptimizerMeasure(Record):
    """The given optimiser. `gains` and `offsets` count the parameters of norms in the model that need a gradient,
    `foreign` the tensors that the optimiser holds and the model does not."""

    name: str
    groups: tuple[OptimizerGroup, ...]
    norms: tuple[NormStep, ...]
    gains: int
    offsets: int
    foreign: int
