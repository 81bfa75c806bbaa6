"""Small models that show the classic results, written out so that each can be read against its paper."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn


class LayerNormByHand(nn.Module):
    """LayerNorm from its formula: (x - mean) / √(variance + eps) · weight + bias."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(width))
        self.bias = nn.Parameter(torch.zeros(width))

    def forward(self, x: Tensor) -> Tensor:
        """Ba et al. 2016, eq. 3 and 4."""
        deviation = x - x.mean(-1, keepdim=True)
        return deviation / (deviation.square().mean(-1, keepdim=True) + self.eps).sqrt() * self.weight + self.bias


class RMSNormByHand(nn.Module):
    """RMSNorm from its formula: x / √(mean of squares + eps) · weight."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        """Zhang and Sennrich 2019, eq. 4."""
        return x / (x.square().mean(-1, keepdim=True) + self.eps).sqrt() * self.weight


class Block(nn.Module):
    """One linear map on a residual stream, with its norm before it or after the sum.

    Args:
        width: of the stream.
        activation: on the output of the linear map.
        post: norm(x + f(x)) in place of x + f(norm(x)).
        std: of normal initial weights; None for torch's own initialisation.
    """

    def __init__(
        self, width: int, activation: nn.Module | None = None, *, post: bool = False, std: float | None = None
    ) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width, bias=False)
        self.activation = activation or nn.Identity()
        self.norm = nn.LayerNorm(width, elementwise_affine=False)
        self.post = post
        if std is not None:
            nn.init.normal_(self.linear.weight, std=std)

    def forward(self, x: Tensor) -> Tensor:
        """One write to the stream."""
        if self.post:
            return torch.as_tensor(self.norm(x + self.activation(self.linear(x))))
        return x + torch.as_tensor(self.activation(self.linear(self.norm(x))))


def stack(blocks: int, width: int, activation: nn.Module | None = None, **options: Any) -> nn.Sequential:
    """Blocks one after the other, drawn from torch's random state in their order."""
    return nn.Sequential(*(Block(width, activation, **options) for _ in range(blocks)))
