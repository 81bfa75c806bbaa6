"""What an optimiser is given of a model: which parameters decay, and how far gradients may reach."""

from normprobe.optimising.clipping import AdaptiveClipping
from normprobe.optimising.groups import decay_groups

__all__ = ["AdaptiveClipping", "decay_groups"]
