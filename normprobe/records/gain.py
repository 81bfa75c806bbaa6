"""The gain of every block, forward and backward."""

from __future__ import annotations

from normprobe.records.base import Record
from normprobe.records.basis import Basis


class BlockGain(Record):
    """One run of a block; `execution` counts the runs of the same block, from 0.

    Attributes:
        until: where the row ends if that is farther than `block`, which holds for layers that others follow with more
            in between: "before" the next layer, or "output"; None where it ends with `block`.
        rms_in, rms_out: RMS of the state before and after it.
        gradient_in, gradient_out: RMS of the loss gradient at these two states.
        forward: rms_out / rms_in; None where rms_in is 0.
        backward: gradient_in / gradient_out, above 1 where the gradient grows on its way back; None where
            gradient_out is 0.
    """

    block: str
    execution: int
    until: str | None = None
    rms_in: float
    rms_out: float
    gradient_in: float
    gradient_out: float
    forward: float | None
    backward: float | None


class Compounded(Record):
    """What the gains of L blocks make together.

    Attributes:
        total: their product, g^L.
        per_block: g, their geometric mean; the same g in a model twice as deep makes g^(2L), `total` squared.
        blocks: L.
    """

    total: float
    per_block: float
    blocks: int


class ChainGain(Record):
    """The blocks of one residual stream, or the layers of a model that has none (`stream` is ".").

    `forward` and `backward` are None where a block's gain is.
    """

    stream: str
    basis: Basis
    blocks: tuple[BlockGain, ...]
    forward: Compounded | None
    backward: Compounded | None


class GainMeasure(Record):
    """Gains of all streams for one loss."""

    loss: str
    streams: tuple[ChainGain, ...]
