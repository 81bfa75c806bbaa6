"""What gradients do, and values that are not finite (5xx)."""

from normprobe.checks.base import Check
from normprobe.checks.gradients.non_finite import NonFinite

ALL: tuple[Check, ...] = (NonFinite(),)
