"""What an optimiser is given of a model: which parameters decay or learn how fast, how far gradients reach."""

from normprobe.optimising.clipping import AdaptiveClipping
from normprobe.optimising.groups import decay_groups
from normprobe.optimising.mup import parameter_groups

__all__ = ["AdaptiveClipping", "decay_groups", "parameter_groups"]
