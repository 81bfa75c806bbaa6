"""What is left of a product's second moment behind the nonlinearity that follows it."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor

from normprobe.records.weights import Follower

_END, _POINTS = 10.0, 4001  # of the trapezoids: 10 standard deviations to each side
_SMOOTH: Mapping[Follower, Callable[[Tensor], Tensor]] = {
    "gelu": F.gelu,
    "silu": F.silu,
    "tanh": torch.tanh,
    "sigmoid": torch.sigmoid,
}


def second_moment(follower: Follower, gain: float, slope: float | None = None) -> float | None:
    """E[f(g z)²], z from N(0, 1): what a weight and the function behind it make of inputs of second moment 1.

    1 keeps the scale. g² without a function, g²/2 for ReLU (He et al. 2015, sec. 2.2), whose recipe has g = √2,
    g²(1 + a²)/2 for a leaky one of slope a below 0 (sec. 2.2, eq. 15); GELU, SiLU, tanh and sigmoid by the trapezoidal
    rule over 20 standard deviations. None for what is no function of one element (norm, softmax, gate), and for an
    unknown follower.

    Args:
        follower: f, as in `WeightSite.followed_by`.
        gain: g = std · √fan_in of the weight; NaN in is NaN out.
        slope: a; None where it is no leaky ReLU.
    """
    if follower in ("none", "relu"):
        return gain**2 / (2 if follower == "relu" else 1)
    if follower == "leaky_relu" and slope is not None:
        return gain**2 * (1 + slope**2) / 2
    function = _SMOOTH.get(follower)
    if function is None:
        return None
    z, density = _normal()
    return float((function(gain * z).square() * density).sum())


@cache
def _normal() -> tuple[Tensor, Tensor]:
    """Points and their weights under the standard normal density."""
    z = torch.linspace(-_END, _END, _POINTS, dtype=torch.float64, device="cpu")
    return z, (-z.square() / 2).exp() / math.sqrt(2 * math.pi) * (2 * _END / (_POINTS - 1))
