"""The maximal update parametrisation: weights, multipliers, and the place of every parameter in it."""

from normprobe.rewrites.mup.layers import without_factor
from normprobe.rewrites.mup.place import Place, Role
from normprobe.rewrites.mup.rewrite import MuP, carried, declared_by_mup

__all__ = ["MuP", "Place", "Role", "carried", "declared_by_mup", "without_factor"]
