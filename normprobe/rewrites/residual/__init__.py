"""Rewrites of what a branch adds to its stream, and of where the sum is normed."""

from normprobe.rewrites.residual.fixup import Fixup
from normprobe.rewrites.residual.post_norm import ToPostNorm
from normprobe.rewrites.residual.scale import ScaleResidual

__all__ = ["Fixup", "ScaleResidual", "ToPostNorm"]
