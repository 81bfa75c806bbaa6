"""The closed forms of the classic results that no other part of normprobe needs."""

from __future__ import annotations

import math


def relu_second_moment(weight_variance: float, fan_in: int) -> float:
    """E[y²] of y = relu(W x) for x of unit second moment and independent symmetric weights: variance · fan_in / 2.

    1 with He's variance 2/fan_in, and 1/2 with 1/fan_in. Source: He et al. 2015, eq. 8 and 9.
    """
    return weight_variance * fan_in / 2


def rmsnorm_shift_change(shift: float) -> float:
    """‖rmsnorm(x + c) - rmsnorm(x)‖ / ‖rmsnorm(x)‖ for independent unit normals x and many features: √(2 - 2/√(1+c²)).

    Source: derived: both have unit RMS, and (x + c)/√(1 + c²) has the cosine 1/√(1 + c²) with x. A norm that
    subtracts the mean gives 0: Zhang and Sennrich 2019, sec. 4.
    """
    return math.sqrt(2 - 2 / math.sqrt(1 + shift**2))


def batchnorm_gap(mean: float, std: float, momentum: float, batches: int) -> float:
    """‖train - eval‖ / ‖eval‖ of a new BatchNorm after batches of one distribution, each of many rows.

    Train mode gives z = (x - mean)/std. The running statistics start at 0 and 1 and have come by the share
    k = 1 - (1 - momentum)^batches of the way, so that eval mode gives (x - k·mean) / √(1 - k + k·std²) =
    (std·z + (1 - k)·mean) / √(1 - k + k·std²).

    Source: derived from Ioffe and Szegedy 2015, algorithms 1 and 2, with running averages as torch keeps them.
    """
    rest = (1 - momentum) ** batches
    spread = math.sqrt(rest + (1 - rest) * std**2)
    return math.hypot(std - spread, rest * mean) / math.hypot(std, rest * mean)
