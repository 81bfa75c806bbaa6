"""Where norms sit (2xx)."""

from normprobe.checks.base import Check
from normprobe.checks.placement.missing_final_norm import MissingFinalNorm
from normprobe.checks.placement.unused_norm import UnusedNorm

ALL: tuple[Check, ...] = (
    MissingFinalNorm(),
    UnusedNorm(),
)
