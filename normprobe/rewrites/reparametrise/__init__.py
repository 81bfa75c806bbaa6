"""Weights that are computed from others at every forward: weight norm and weight standardisation, added and removed."""

from normprobe.rewrites.reparametrise.add import Reparametrise
from normprobe.rewrites.reparametrise.remove import PlainWeights

__all__ = ["PlainWeights", "Reparametrise"]
