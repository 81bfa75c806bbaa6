"""What single branches and blocks do to the output."""

from __future__ import annotations

from normprobe.records.base import Record
from normprobe.records.basis import Basis


class Effect(Record):
    """How far an output is from that of the whole model, mean over tokens or samples without padding.

    Attributes:
        kl: KL(whole ‖ changed) in nats; None where the model has no head over classes.
        agreement: share of rows with the same largest logit; None as above.
        change: ‖changed − whole‖ / ‖whole‖ of the first output; None where the whole one is 0.
    """

    kl: float | None
    agreement: float | None
    change: float | None


class SkippedBranch(Record):
    """One write replaced by 0; `branch` indexes `Stream.branches` (the last of those that are merged at the add)."""

    stream: str
    branch: int
    path: str
    block: str
    kind: str
    effect: Effect


class Readout(Record):
    """The state after one run of a block, read by what follows the last write of the stream."""

    stream: str
    block: str
    execution: int
    effect: Effect


class DepthMeasure(Record):
    """Skipped branches and readouts in order of execution; `writes` is the number of writes in all, of which `branches`
    are a sample where `basis.exact` is false."""

    basis: Basis
    writes: int
    branches: tuple[SkippedBranch, ...]
    readouts: tuple[Readout, ...]
