"""What a norm by itself does wrong (1xx)."""

from normprobe.checks.base import Check
from normprobe.checks.norms.eps_outside_root import EpsOutsideRoot
from normprobe.checks.norms.eps_vanishes_in_dtype import EpsVanishesInDtype
from normprobe.checks.norms.half_precision_reduction import HalfPrecisionReduction
from normprobe.checks.norms.name_contradicts_behaviour import NameContradictsBehaviour

ALL: tuple[Check, ...] = (
    EpsOutsideRoot(),
    EpsVanishesInDtype(),
    HalfPrecisionReduction(),
    NameContradictsBehaviour(),
)
