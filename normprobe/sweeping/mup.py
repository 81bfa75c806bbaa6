"""Initial scales of the maximal update parametrisation, muP (Yang et al. 2022, table 3)."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from normprobe import stats
from normprobe.rewrites.mup import Place


def initial_factors(model: nn.Module, base: nn.Module, found: Mapping[str, Place]) -> dict[str, float]:
    """Factors on the initial values of `model` that make its parametrisation muP's, from those of a drawn base.

    The RMS of a hidden matrix should be that of the base over √ratio, of a readout that of the base over the ratio, of
    all else that of the base (Yang et al. 2022, table 3). What is 0 stays 0.
    """
    theirs = dict(base.named_parameters())
    powers = {"hidden": 0.5, "readout": 1.0}
    factors = {}
    for name, parameter in model.named_parameters():
        place, mine = found[name], _rms(parameter)
        if place.role not in ("unknown", "fixed") and mine > 0:
            factors[name] = _rms(theirs[name]) / place.ratio ** powers.get(place.role, 0.0) / mine
    return factors


def rescale(model: nn.Module, factors: Mapping[str, float]) -> None:
    """Multiply parameters in place."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name in factors:
                parameter.mul_(factors[name])


def _rms(tensor: Tensor) -> float:
    return float(stats.token_rms(tensor.flatten())) if tensor.numel() else 0.0
