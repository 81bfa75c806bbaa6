"""Weights: where each is used, and what those that are computed at every forward are made from."""

from __future__ import annotations

from typing import Literal

from normprobe.records.base import Record
from normprobe.records.sites import OpSite

WeightRole = Literal["reader", "writer", "inner", "embedding", "head", "other"]
Follower = Literal[
    "relu",
    "leaky_relu",
    "gelu",
    "silu",
    "tanh",
    "sigmoid",
    "softmax",
    "gate",
    "norm",
    "none",
    "unknown",
]


class Reparametrization(Record):
    """A weight that is computed from other parameters at every forward, by the sizes of slices of one of them.

    The size of a slice is its L2 norm; of weight standardisation the standard deviation of its elements, by their
    number.

    Attributes:
        path: module in which the weight is used.
        parameter: what it follows but for the scale (weight norm's v), and for the mean where it is standardised.
        gain: a parameter that its scale is proportional to (weight norm's g); None where there is none.
        axes: axes of `parameter`, counted from 0, that one size is taken over; all where it is one for the whole.
        floor: what slices far smaller than it are divided by in place of their size, as an eps has it (the root of one
            inside a root); None where even 1e-20 is divided by its size.
        zeros: whether a weight of zeros is computed without NaN or infinity.
    """

    path: str
    kind: Literal["weight_norm", "spectral_norm", "weight_standardization"]
    parameter: str = ""
    gain: str | None = None
    axes: tuple[int, ...] = ()
    floor: float | None = None
    zeros: bool = True


class WeightSite(Record):
    """One weight and the first product, convolution or lookup that uses it. A tied weight is listed once.

    Attributes:
        parameter: its name.
        roles: `reader` and `writer` of a branch, `inner` between them, `embedding` on the way into a stream,
            `head` for the readout, else `other`; a tied weight has several.
        stream: index of the stream that it belongs to in `Anatomy.streams`, `branch` that of the branch there.
        shape: of the parameter.
        fan_in: how many inputs each output sums over; 1 for a lookup. Of a convolution the channels of one group
            times the places of the kernel.
        fan_out: how many outputs each input reaches, with the places of the kernel; the width for a lookup.
        output_axis: axis of the parameter that numbers the output features.
        kind: `experts` where some axes number independent matrices.
        operand: which of the two factors of the product holds it, or of the two operands of a convolution or lookup.
        followed_by: what the product passes first besides biases, views, casts and constant factors; an activation
            that consists of several operations is told by what they compute together.
        slope: of a leaky ReLU that follows, the slope below 0; else None.
        source: the weight whose product it reads past biases, views, poolings and activations alone; None where a norm,
            a factor or another signal comes between, or no weight comes before.
        site: where it is used first.
    """

    parameter: str
    roles: tuple[WeightRole, ...]
    stream: int | None = None
    branch: int | None = None
    shape: tuple[int, ...]
    fan_in: int
    fan_out: int
    output_axis: int
    kind: Literal["linear", "conv", "embedding", "experts"]
    operand: Literal[0, 1]
    followed_by: Follower = "unknown"
    slope: float | None = None
    source: str | None = None
    site: OpSite
