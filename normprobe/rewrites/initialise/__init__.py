"""Draw weights anew by their place in the data flow."""

from normprobe.rewrites.initialise.rewrite import Initialise
from normprobe.rewrites.initialise.schemes import SCHEMES

__all__ = ["SCHEMES", "Initialise"]
