"""Mean squared singular values of the Jacobians of blocks and of the whole model."""

from __future__ import annotations

from typing import Literal

from normprobe.records.base import Record
from normprobe.records.basis import Basis


class MeanSquare(Record):
    """Mean squared singular value of the Jacobian between two tensors, over the singular values of its input.

    1 keeps lengths on average (dynamical isometry asks that every singular value is near 1).

    Attributes:
        start, end: what is varied, and what is looked at.
        value: mean over the probes.
        standard_error: of that mean: standard deviation over √probes.
        inputs, outputs: number of entries of the two tensors.
    """

    start: str
    end: str
    value: float
    standard_error: float
    inputs: int
    outputs: int


class BlockJacobian(Record):
    """One run of a block: from the state before it to the state after it; `until` as in `BlockGain`."""

    block: str
    execution: int
    until: str | None = None
    square: MeanSquare


class ChainJacobian(Record):
    """The blocks of one residual stream, or the layers of a model that has none (`stream` is ".").

    `whole` leads from the state before the first block that was seen to the state after the last.
    """

    stream: str
    basis: Basis
    blocks: tuple[BlockJacobian, ...]
    whole: MeanSquare


class JacobianMeasure(Record):
    """Jacobians at the inputs that were given.

    Attributes:
        probes: random vectors of ±1 behind each value.
        mode: "reverse": products with the transposed Jacobian, |Jᵀu|², which have the same mean as |Jv|².
        output: from the model's input, where that is floating point, else from the first state of each stream, to the
            first tensor that it returns.
    """

    probes: int
    mode: Literal["reverse"]
    streams: tuple[ChainJacobian, ...]
    output: tuple[MeanSquare, ...]
