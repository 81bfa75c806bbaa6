"""Closed forms, each with its citation. Pure mathematics: nothing here imports torch.

Symbols: L layers (blocks), l the index of a layer from 1, N encoder layers, M decoder layers, d width of the
stream.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

Architecture = Literal["encoder", "decoder", "encoder-decoder"]


@dataclass(frozen=True)
class Format:
    """Limits of a floating-point format.

    Attributes:
        largest: largest finite value.
        smallest_normal: smallest positive normal value.
        smallest_subnormal: smallest positive value.
        epsilon: distance from 1 to the next larger value.
        source: the standard or paper that defines the format.
    """

    name: str
    largest: float
    smallest_normal: float
    smallest_subnormal: float
    epsilon: float
    source: str

    def vanishes(self, value: float) -> bool:
        """Whether `value` becomes 0 in this format (round to nearest, ties to even); True for NaN."""
        return not abs(value) > self.smallest_subnormal / 2

    def spacing(self, value: float) -> float:
        """Distance between neighbouring representable numbers at `value`; NaN where `value` is not finite."""
        if not math.isfinite(value):
            return math.nan
        magnitude = max(abs(value), self.smallest_normal)
        return self.epsilon * 2.0 ** (math.frexp(magnitude)[1] - 1)


FLOAT16 = Format("float16", 65504.0, 2.0**-14, 2.0**-24, 2.0**-10, "IEEE 754-2019, binary16")
BFLOAT16 = Format("bfloat16", 2.0**127 * (2 - 2.0**-7), 2.0**-126, 2.0**-133, 2.0**-7, "Kalamkar et al. 2019")
FLOAT32 = Format("float32", 2.0**127 * (2 - 2.0**-23), 2.0**-126, 2.0**-149, 2.0**-23, "IEEE 754-2019, binary32")
FLOAT64 = Format("float64", 2.0**1023 * (2 - 2.0**-52), 2.0**-1022, 2.0**-1074, 2.0**-52, "IEEE 754-2019, binary64")
FLOAT8_E4M3 = Format("float8_e4m3fn", 448.0, 2.0**-6, 2.0**-9, 2.0**-3, "Micikevicius et al. 2022, table 1")
FLOAT8_E5M2 = Format("float8_e5m2", 57344.0, 2.0**-14, 2.0**-16, 2.0**-2, "Micikevicius et al. 2022, table 1")
FORMATS = {f.name: f for f in (FLOAT16, BFLOAT16, FLOAT32, FLOAT64, FLOAT8_E4M3, FLOAT8_E5M2)}


def format_of(dtype: str) -> Format | None:
    """The format named by `dtype` ("float16", "torch.float16", "bf16", …), or None where it is unknown."""
    name = dtype.strip().lower().removeprefix("torch.")
    short = {"half": "float16", "fp16": "float16", "bf16": "bfloat16", "float": "float32", "fp32": "float32"}
    return FORMATS.get(short.get(name, name))


def independent_growth(write_rms: Iterable[float], entry_rms: float = 0.0) -> float:
    """RMS of a stream after independent writes: √(entry² + Σ write²), √L for L unit writes and no entry.

    Args:
        write_rms: RMS of each write.
        entry_rms: RMS of the stream before the first write.

    Returns:
        RMS in the unit of the arguments; NaN where one is.

    Source: variances of independent summands add; for Pre-LN Xiong et al. 2020, lemma 2.
    """
    return math.hypot(entry_rms, *write_rms)


def residual_init_factor(layers: int, writes_per_layer: int = 2) -> float:
    """Factor on the initial std of the matrices that write to the stream: 1/√(writes), 1/√(2N) for a
    Transformer.

    Args:
        layers: number of layers, at least 1.
        writes_per_layer: residual adds per layer, at least 1.

    Raises:
        ValueError: if an argument is smaller than 1.

    Source: Radford et al. 2019 (GPT-2), sec. 2.3, where N is the number of residual writes.
    """
    _at_least(layers, 1, "layers")
    _at_least(writes_per_layer, 1, "writes_per_layer")
    return 1.0 / math.sqrt(layers * writes_per_layer)


@dataclass(frozen=True)
class DeepNormScale:
    """DeepNorm's `alpha` on the skip and `beta` on the initial gain of value, output and feed-forward
    matrices."""

    alpha: float
    beta: float


def deepnorm(
    architecture: Architecture, *, encoder_layers: int = 0, decoder_layers: int = 0
) -> dict[Literal["encoder", "decoder"], DeepNormScale]:
    """DeepNorm's constants for each stack of the architecture.

    Args:
        architecture: which stacks the model has.
        encoder_layers: N, at least 1 where there is an encoder.
        decoder_layers: M, at least 1 where there is a decoder.

    Returns:
        One `DeepNormScale` a stack.

    Raises:
        ValueError: if the number of layers of a stack that the architecture has is smaller than 1.

    Source: Wang et al. 2022 (DeepNet), fig. 2.
    """
    n, m = encoder_layers, decoder_layers
    if architecture != "decoder":
        _at_least(n, 1, "encoder_layers")
    if architecture != "encoder":
        _at_least(m, 1, "decoder_layers")
    if architecture == "encoder":
        return {"encoder": DeepNormScale((2 * n) ** 0.25, (8 * n) ** -0.25)}
    if architecture == "decoder":
        return {"decoder": DeepNormScale((2 * m) ** 0.25, (8 * m) ** -0.25)}
    mixed = (n**4 * m) ** (1 / 16)
    return {
        "encoder": DeepNormScale(0.81 * mixed, 0.87 / mixed),
        "decoder": DeepNormScale((3 * m) ** 0.25, (12 * m) ** -0.25),
    }


def post_norm_skip_decay(layer: int, layers: int, norms_per_layer: int = 2, branch_rms: float = 1.0) -> float:
    """Gradient that reaches layer l of a Post-LN stack along the skips alone, relative to the last layer.

    Every norm(x + f) between them divides the skip by the RMS of its input, √(1 + r²) for a unit x and an
    independent branch f of RMS r. What flows back through the branches comes on top and depends on them.

    Args:
        layer: l, from 1 to `layers`.
        layers: L, at least 1.
        norms_per_layer: norms on the trunk per layer, 2 for attention and feed-forward.
        branch_rms: r, the RMS of every branch.

    Returns:
        A ratio in (0, 1].

    Raises:
        ValueError: if `layer` lies outside 1 … L.

    Source: derived from the Jacobian of a norm, 1/RMS (Xiong et al. 2020, lemma 3).
    """
    if not 1 <= layer <= layers:
        raise ValueError(f"layer must lie between 1 and {layers}, found {layer}")
    return float((1 + branch_rms**2) ** (-norms_per_layer * (layers - layer) / 2))


def gradient_slope(post_norm: bool, branch_rms: float = 1.0) -> float:
    """Slope of the logarithm of the parameter gradients' norm from one branch to the next, first to last, at init.

    Pre-LN: 0, gradients have the same order in all layers. Post-LN: ½ ln(1 + r²), as the norm on the trunk after each
    branch divides the skip by √(1 + r²); what flows back through the branches comes on top and makes it flatter.

    Args:
        post_norm: Post-LN; else Pre-LN.
        branch_rms: r, the RMS of every branch over that of the trunk.

    Source: Xiong et al. 2020, sec. 3, and `post_norm_skip_decay` for Post-LN.
    """
    return math.log(1 / post_norm_skip_decay(1, 2, 1, branch_rms)) if post_norm else 0.0


def lecun_std(fan_in: int) -> float:
    """Initial std that keeps the variance of a linear layer: √(1/fan_in).

    Source: LeCun et al. 1998, sec. 4.6.
    """
    _at_least(fan_in, 1, "fan_in")
    return math.sqrt(1 / fan_in)


def xavier_std(fan_in: int, fan_out: int, gain: float = 1.0) -> float:
    """Initial std between forward and backward variance: gain · √(2/(fan_in + fan_out)).

    Source: Glorot & Bengio 2010, eq. 12 and 16.
    """
    _at_least(fan_in, 1, "fan_in")
    _at_least(fan_out, 1, "fan_out")
    return gain * math.sqrt(2 / (fan_in + fan_out))


def kaiming_std(fan_in: int, negative_slope: float = 0.0) -> float:
    """Initial std before a (leaky) ReLU: √(2/((1 + a²) fan_in)). Source: He et al. 2015, eq. 10 and 15."""
    _at_least(fan_in, 1, "fan_in")
    return math.sqrt(2 / ((1 + negative_slope**2) * fan_in))


def _at_least(value: int, least: int, name: str) -> None:
    if value < least:
        raise ValueError(f"{name} must be at least {least}, found {value}")


def gaussian_divergence(shift: float, ratio: float) -> float:
    """Kullback-Leibler divergence of N(m', r·v) from N(m, v) in nat: `½ (r − 1 − ln r + s²)`; ∞ at r = 0 and r = ∞.

    Args:
        shift: s = (m' − m) / √v.
        ratio: r, the first variance over the second, at least 0.

    Source: the definition of Kullback and Leibler 1951 with two normal densities.
    """
    return math.inf if ratio in (0.0, math.inf) else (ratio - 1 - math.log(ratio) + shift**2) / 2
