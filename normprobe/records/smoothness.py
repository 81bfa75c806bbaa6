"""How fast the gradient of the loss changes along a gradient step."""

from __future__ import annotations

from normprobe.records.base import Record
from normprobe.records.basis import Basis


class GradientStep(Record):
    """One step against the gradient.

    Attributes:
        distance: its length, in the unit of the parameters.
        loss: there.
        gradient_change: norm of the difference of the gradients there and at the start.
        cosine: between these two gradients; None where one is 0.
        lipschitz: gradient_change / distance.
    """

    distance: float
    loss: float
    gradient_change: float
    cosine: float | None
    lipschitz: float


class SmoothnessMeasure(Record):
    """`lipschitz` is the largest over the steps; norms are L2 norms over all parameters that the loss depends on."""

    loss: str
    value: float
    basis: Basis
    gradient_norm: float
    parameter_norm: float
    steps: tuple[GradientStep, ...]
    lipschitz: float
