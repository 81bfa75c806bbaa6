"""Which keys the numbers that are added to logits hide: those that a wide gap parts from all that are seen.

Dims: Q queries, K keys.
"""

from __future__ import annotations

import torch
from torch import Tensor

from normprobe.stats import widen

GAP = 50.0  # a logit that much below another one weighs e⁻⁵⁰ = 2e-22 of it: nothing, in any number of keys


def unseen(added_QK: Tensor) -> Tensor:
    """True where a number that is added lies below a gap of `GAP` or more in its row: a slope alone hides nothing.

    A whole row is hidden where it lies below such a gap under 0, which adds nothing, and all other numbers.
    """
    added = widen(added_QK)
    if not added.numel():
        return torch.zeros_like(added, dtype=torch.bool)
    highest = added.amax(-1, keepdim=True)
    if not bool((highest > -GAP).all()):
        highest = highest.clamp(min=float(lowest_reached(added.flatten(), added.new_zeros(1))))
    return added < lowest_reached(added, highest)


def lowest_reached(values: Tensor, start: Tensor, top: Tensor | None = None) -> Tensor:
    """The lowest number on the last axis, which is kept with size 1, that steps below `GAP` lead down to from `start`;
    with `top` also wider ones, below the distance from it. NaN leads nowhere."""
    while True:
        step = GAP if top is None else (top - start).clamp(min=GAP)
        near = values.masked_fill(~(start - values < step), torch.inf)
        below = torch.minimum(start, near.amin(-1, keepdim=True))
        if not bool((below < start).any()):
            return start
        start = below
