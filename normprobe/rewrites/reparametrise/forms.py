"""What computes a weight: by the direction of its rows and a length for each, or by standardised rows."""

from __future__ import annotations

from typing import final

import torch
from torch import Tensor, nn


@final
class NormedRows(nn.Module):
    """w = g · v / ‖v‖, the norm over `axes` (Salimans & Kingma 2016, eq. 2). v keeps the shape of w; g has 1 there.

    From a weight it takes v = w and g = ‖w‖, so that it starts as it was.
    """

    def __init__(self, axes: tuple[int, ...]) -> None:
        super().__init__()
        self.axes = axes

    def forward(self, length: Tensor, direction: Tensor) -> Tensor:
        """The weight."""
        norm = _floating(direction).square().sum(self.axes, keepdim=True).sqrt().to(direction.dtype)
        return direction * (length / norm)  # the very weight that it was made from, as long as nothing moved

    def right_inverse(self, weight: Tensor) -> tuple[Tensor, Tensor]:
        """Length and direction of a weight."""
        return _floating(weight).square().sum(self.axes, keepdim=True).sqrt().to(weight.dtype), _plain(weight)


@final
class StandardisedRows(nn.Module):
    """w = g · (v − mean) / √(N var + eps), mean and variance over the N elements of `axes`, g learned for each output.

    Source: Brock et al. 2021, Characterizing signal propagation to close the performance gap, eq. 5.

    From a weight it takes v = w and g = √N std(w): a weight without a mean over its inputs stays as it was.
    """

    def __init__(self, axes: tuple[int, ...], eps: float) -> None:
        super().__init__()
        self.axes, self.eps = axes, eps

    def forward(self, gain: Tensor, source: Tensor) -> Tensor:
        """The weight."""
        centred = _floating(source) - _floating(source).mean(self.axes, keepdim=True)
        return gain * (centred * torch.rsqrt(centred.square().sum(self.axes, keepdim=True) + self.eps)).to(source.dtype)

    def right_inverse(self, weight: Tensor) -> tuple[Tensor, Tensor]:
        """Gain and source of a weight."""
        centred = _floating(weight) - _floating(weight).mean(self.axes, keepdim=True)
        return (centred.square().sum(self.axes, keepdim=True) + self.eps).sqrt().to(weight.dtype), _plain(weight)


def _plain(weight: Tensor) -> Tensor:
    """The weight itself, or a copy of one that was made in inference mode, which torch registers as no parameter."""
    return weight.clone() if weight.is_inference() else weight


def _floating(tensor: Tensor) -> Tensor:
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))
