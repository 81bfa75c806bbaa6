"""What gains and offsets of norms are where they do nothing."""

from __future__ import annotations

from collections.abc import Container, Mapping

from normprobe.records import Anatomy


def norm_values(anatomy: Anatomy, named: Container[str]) -> Mapping[str, float]:
    """1 for every gain (stored 0 where the norm adds the 1) and 0 for every offset, by the parameters in `named`."""
    return {
        name: value
        for norm in anatomy.norms
        for name, value in ((norm.weight, 0.0 if norm.affine.startswith("one_plus") else 1.0), (norm.bias, 0.0))
        if name is not None and name in named
    }
