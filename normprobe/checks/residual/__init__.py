"""What the residual stream does (3xx)."""

from normprobe.checks.base import Check
from normprobe.checks.residual.half_headroom import HalfHeadroom
from normprobe.checks.residual.massive_activations import MassiveActivations

ALL: tuple[Check, ...] = (
    MassiveActivations(),
    HalfHeadroom(),
)
