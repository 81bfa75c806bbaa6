"""What batch norms do to this batch, against the statistics that they keep."""

from __future__ import annotations

from typing import Literal

from normprobe.records.base import Record
from normprobe.records.basis import Basis


class KeptStatistics(Record):
    """One batch norm's stored statistics (mean m, variance v) against those of the batch (m', v'), channel by channel.

    With s = (m' − m) / √(v + eps) and r = (v' + eps) / (v + eps), v' unbiased:

    Attributes:
        mean_shift: median over channels of |s|, in stored standard deviations; `mean_shift_max` the largest.
        variance_ratio: median of r; `variance_ratio_min` and `variance_ratio_max` the extremes.
        divergence: median of ½(r − 1 − ln r + s²), in nat: the Kullback-Leibler divergence of N(m', v' + eps) from
            N(m, v + eps), 0 where they agree; `divergence_max` the largest, at channel `worst_channel`.

    With n independent values behind a channel, agreeing statistics still give |s| near 0.67/√n and r within
    1 ± √(2/n).
    """

    mean_shift: float
    mean_shift_max: float
    variance_ratio: float
    variance_ratio_min: float
    variance_ratio_max: float
    divergence: float
    divergence_max: float
    worst_channel: int


class BatchNormSite(Record):
    """One batch norm.

    Attributes:
        path: of its module.
        channels: how many have a statistic each.
        count: values behind the statistic of each channel in this batch, over all its executions.
        shape: of its input, the first time it runs.
        padding: how many places of the input that the caller's masks call padding stand behind each statistic.
        training, learns: the train flag of the module as it was given, and whether any of its parameters requires a
            gradient (None where it has none).
        synchronised: whether train mode shares statistics between processes; None where that is not known.
        keeps: "moving": train mode moves the stored statistics; "fixed": it uses them as well; "none": none are stored.
        default: all stored means are 0 and all variances 1: they have never been moved, or were reset. None where
            none are stored.
        finite: whether all stored statistics are finite, and no variance negative.
        below_eps: how many channels have a stored variance smaller than eps, 0 among them: eps alone sets their scale
            there. None where no variance is stored.
        zero_variances: how many channels have a stored variance of exactly 0. None where none is stored.
        momentum: share of each new batch in the stored statistics; None where it is not constant (a cumulative
            average) or nothing moves.
        tracked: how many batches they have seen, where that is counted.
        initial_share: (1 − momentum)^tracked, the weight that the values they started from still have; None where
            either is unknown.
        kept: stored statistics against those of the batch; None where none are stored, they are not finite, or a
            channel has one value.
    """

    path: str
    channels: int
    count: int
    shape: tuple[int, ...] = ()
    padding: int = 0
    training: bool | None = None
    learns: bool | None = None
    synchronised: bool | None = None
    keeps: Literal["moving", "fixed", "none"]
    default: bool | None
    finite: bool | None
    below_eps: int | None = None
    zero_variances: int | None = None
    momentum: float | None
    tracked: int | None
    initial_share: float | None
    kept: KeptStatistics | None


class BatchNormMeasure(Record):
    """All batch norms on one batch (Ioffe and Szegedy 2015). The stored statistics stay as they are.

    The two gaps take passes of their own; None where these were not asked for, or could not be run.

    Attributes:
        basis: `count` is the number of samples in the batch.
        sites: in the order of the Anatomy; their inputs are those of eval mode.
        training: the train flag of the whole model as it was given.
        others_learn: whether any parameter outside the batch norms requires a gradient.
        processes: how many processes compute together (torch.distributed).
        train_eval_gap: ‖train − eval‖ / ‖eval‖ (L2, over all floating outputs), where "train" has the batch norms in
            train mode and all else in eval mode; 0: the statistics of this batch lead to the same outputs.
        halves_gap: ‖halves − whole‖ / ‖whole‖, batch norms in train mode: the batch in two parts against in one; how
            far outputs depend on the size of the batch.
        untouched: whether all buffers of the model hold after the measure what they held before, compared bit by bit.
    """

    basis: Basis
    sites: tuple[BatchNormSite, ...]
    training: bool | None = None
    others_learn: bool | None = None
    processes: int = 1
    train_eval_gap: float | None
    halves_gap: float | None
    untouched: bool
