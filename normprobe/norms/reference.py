"""The closed forms of every kind of norm, in plain torch, each with its source.

They are the hypotheses that the identification holds a module against, and the references of the tests.
Every function computes in the dtype it is given; gain and offset are left to the caller.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def mean_square(x: Tensor, axes: Sequence[int], *, centred: bool) -> tuple[Tensor, Tensor]:
    """Deviation and mean square that the statistic norms are made of.

    Args:
        x: any shape, any floating dtype.
        axes: the axes that share one statistic.
        centred: whether the mean over `axes` is subtracted first.

    Returns:
        `(d, v)`: `d` is `x` or `x - mean`, shaped as `x`; `v` is the mean of `d²` over `axes`, kept as 1.
    """
    deviation = x - x.mean(tuple(axes), keepdim=True) if centred else x
    return deviation, deviation.square().mean(tuple(axes), keepdim=True)


def layernorm(x: Tensor, eps: float = 0.0, axes: Sequence[int] = (-1,)) -> Tensor:
    """`(x - mean) / sqrt(var + eps)` with the biased variance over `axes` (Ba et al. 2016, eq. 3)."""
    deviation, variance = mean_square(x, axes, centred=True)
    return deviation / (variance + eps).sqrt()


def rmsnorm(x: Tensor, eps: float = 0.0, axes: Sequence[int] = (-1,)) -> Tensor:
    """`x / sqrt(mean(x²) + eps)` over `axes` (Zhang and Sennrich 2019, eq. 4)."""
    _, variance = mean_square(x, axes, centred=False)
    return x / (variance + eps).sqrt()


def l2norm(x: Tensor, eps: float = 0.0, axes: Sequence[int] = (-1,)) -> Tensor:
    """`x / max(‖x‖₂, eps)` over `axes`, the form of query-key normalisation (Henry et al. 2020, eq. 3)."""
    return x / x.square().sum(tuple(axes), keepdim=True).sqrt().clamp_min(eps)


def scalenorm(x: Tensor, scale: Tensor | float = 1.0, eps: float = 0.0) -> Tensor:
    """`g · x / max(‖x‖₂, eps)` over the features with one scalar g (Nguyen and Salazar 2019, eq. 5)."""
    return scale * l2norm(x, eps)


def batchnorm(x: Tensor, eps: float = 0.0) -> Tensor:
    """Layer norm's form over every axis but the channels, axis 1 (Ioffe and Szegedy 2015, algorithm 1)."""
    return layernorm(x, eps, [axis for axis in range(x.ndim) if axis != 1])


def batchnorm_frozen(x: Tensor, mean: Tensor, variance: Tensor, eps: float = 0.0) -> Tensor:
    """`(x - mean) / sqrt(variance + eps)` with stored statistics of shape (C,), channels on axis 1.

    Source: Ioffe and Szegedy 2015, algorithm 2, line 11.
    """
    shape = (1, -1, *[1] * (x.ndim - 2))
    return (x - mean.reshape(shape)) / (variance.reshape(shape) + eps).sqrt()


def groupnorm(x: Tensor, groups: int, eps: float = 0.0) -> Tensor:
    """Layer norm's form over each group of channels (axis 1) and all of space (Wu and He 2018, eq. 7)."""
    return layernorm(x.reshape(x.shape[0], groups, -1), eps).reshape(x.shape)


def instancenorm(x: Tensor, eps: float = 0.0) -> Tensor:
    """Layer norm's form over space alone, axes 2 and on (Ulyanov et al. 2016, eq. 2)."""
    return layernorm(x, eps, range(2, x.ndim))


def grn(x: Tensor, gain: Tensor | float, offset: Tensor | float, eps: float = 0.0) -> Tensor:
    """Global response normalisation of x (B, H, W, C): `gain · x · n + offset + x`.

    `n` is each channel's L2 norm over space, divided by its mean over the channels.

    Source: Woo et al. 2023, algorithm 1.
    """
    response = x.square().sum((1, 2), keepdim=True).sqrt()
    return gain * (x * response / (response.mean(-1, keepdim=True) + eps)) + offset + x


def lrn(x: Tensor, size: int, alpha: float = 1e-4, beta: float = 0.75, k: float = 1.0) -> Tensor:
    """`x / (k + alpha · m)^beta`, m the mean of x² over a window of `size` channels, zeros outside.

    Source: Krizhevsky et al. 2012, sec. 3.3, with alpha divided by the window as torch does.
    """
    low = size // 2
    shape = (x.shape[0], low + x.shape[1] + size - 1 - low, *x.shape[2:])
    padded = torch.zeros(shape, dtype=x.dtype, device=x.device)
    padded[:, low : low + x.shape[1]] = x.square()
    return x / (k + alpha * padded.unfold(1, size, 1).mean(-1)).pow(beta)


def dyt(x: Tensor, alpha: Tensor | float, gain: Tensor | float = 1.0, offset: Tensor | float = 0.0) -> Tensor:
    """`gain · tanh(alpha · x) + offset`: bounded, without statistics (Zhu et al. 2025, eq. 2)."""
    return gain * torch.tanh(alpha * x) + offset
