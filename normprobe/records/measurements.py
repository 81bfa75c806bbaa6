"""What was measured. Each group says its unit, dtype, how many values it stands on, and whether it is exact."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from normprobe.records.base import Record
from normprobe.records.basis import Basis
from normprobe.records.batchnorm import BatchNormMeasure
from normprobe.records.bounded import BoundedNorm
from normprobe.records.computed_weights import ComputedWeight
from normprobe.records.cost import CostMeasure
from normprobe.records.depth import DepthMeasure
from normprobe.records.gain import GainMeasure
from normprobe.records.gradients import GradientMeasure
from normprobe.records.init import Initialisation
from normprobe.records.jacobian import JacobianMeasure
from normprobe.records.non_finite import BrokenTensor, NonFinite
from normprobe.records.norm_curves import NormsMeasure
from normprobe.records.norm_gains import NormGain
from normprobe.records.optimizer import OptimizerMeasure
from normprobe.records.precision import PrecisionMeasure
from normprobe.records.products import ProductsMeasure
from normprobe.records.repeats import RepeatedNorm
from normprobe.records.residual import StreamMeasure
from normprobe.records.smoothness import SmoothnessMeasure


class Margins(Record):
    """Half widths of 99 % intervals about what a sample of rows tells of all rows; 0 where all rows were taken.

    Rows are drawn without putting back, one from each stretch of the sequence, which lies nearer than rows from
    anywhere (Cochran 1977, sec. 5.6). `std` and `entropy`: Student's quantile times the standard error by the spread
    that the rows show (sec. 2.8 and, as `std` is of a ratio, 6.3). A few rows far from the others are missed by
    many samples, which then show too little spread (sec. 2.15), so that the standard error is taken at the upper end of
    its own 99 % interval, by the kurtosis of the rows (Cramér 1946, sec. 27.4); that it is this end is a choice.
    `saturated`, `first_token` and `sink`, which a few rows may decide: 2.58 of the largest standard errors that numbers
    in [0, 1] of their mean can have, with two of either end added (Agresti & Coull 1998).

    NaN where fewer than three rows are left for `std` and `entropy`. How often the intervals hold on a trained model,
    and in its worst head, is in docs/performance.md: where one row in hundreds holds a third of the spread, no sample
    without it can tell.
    """

    std: float
    entropy: float
    saturated: float
    first_token: float
    sink: float | None = None


class HeadLogits(Record):
    """Attention logits of one head, after scale and mask, before softmax.

    Attributes:
        sampled_max: largest logit over the sampled query rows.
        uncapped_max: the largest scaled q·kᵀ of these rows, before soft cap and bias; equal where there are none, None
            where it was not seen.
        bound: an upper bound on every logit over all rows and keys: max|q|·max|k|·|scale| plus the largest mask
            bias where q and k were seen; the largest logit itself where the logits were.
        std: standard deviation of the unmasked logits in the sampled rows.
        entropy: mean row entropy over ln(number of unmasked keys), in [0, 1]; rows with one key are left out. Of the
            probabilities of keys among themselves where a sink takes a share.
        saturated: share of sampled rows whose largest probability exceeds 0.99 (rows with one key left out).
        first_token: mean probability on the first key that is no padding.
        sink: mean probability on logits that belong to no key (Xiao et al. 2024); None where there are none.
        q_rms, k_rms: RMS of the entries of all queries and keys as they are multiplied; None where only logits were
            seen.
        margins: how far std, entropy, saturated and first_token may lie from those of all rows.
    """

    head: int
    sampled_max: float
    bound: float
    std: float
    entropy: float
    saturated: float
    first_token: float
    uncapped_max: float | None
    sink: float | None = None
    q_rms: float | None
    k_rms: float | None
    margins: Margins


class AttentionMeasure(Record):
    """All heads of one attention site; `rows` query rows per head were looked at, padding left out. `grid` is the
    dtype to whose numbers the logits were rounded: a half one where they were cast wider for the softmax alone."""

    path: str
    basis: Basis
    rows: int
    grid: str = "unknown"
    heads: tuple[HeadLogits, ...]


class Measurements(Record):
    """Everything that was measured; None or empty where the level did not ask for it."""

    residual: tuple[StreamMeasure, ...] = ()
    attention: tuple[AttentionMeasure, ...] = ()
    norm_gains: tuple[NormGain, ...] = ()
    computed_weights: tuple[ComputedWeight, ...] = ()
    bounded_norms: tuple[BoundedNorm, ...] = ()
    optimizer: OptimizerMeasure | None = None
    repeated_norms: tuple[RepeatedNorm, ...] = ()
    init: Initialisation | None = None
    gradients: GradientMeasure | None = None
    batchnorm: BatchNormMeasure | None = None
    gain: GainMeasure | None = None
    jacobian: JacobianMeasure | None = None
    smoothness: SmoothnessMeasure | None = None
    depth: DepthMeasure | None = None
    norms: NormsMeasure | None = None
    products: ProductsMeasure | None = None
    cost: CostMeasure | None = None
    precision: PrecisionMeasure | None = None
    output_finite: bool | None = None
    first_non_finite: str | None = Field(
        default=None, description="path of the first module whose output was not finite"
    )
    first_non_finite_operation: NonFinite | None = None
    non_finite_tensors: tuple[BrokenTensor, ...] = Field(
        default=(),
        description="parameters and buffers that are not finite",
    )


Level = Literal["structure", "forward", "backward"]
