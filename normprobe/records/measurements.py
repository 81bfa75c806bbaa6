"""What was measured. Each group says its unit, dtype, how many values it stands on, and whether it is exact."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from normprobe.records.base import Record
from normprobe.records.basis import Basis
from normprobe.records.batchnorm import BatchNormMeasure
from normprobe.records.cost import CostMeasure
from normprobe.records.depth import DepthMeasure
from normprobe.records.gain import GainMeasure
from normprobe.records.gradients import GradientMeasure
from normprobe.records.init import Initialisation
from normprobe.records.jacobian import JacobianMeasure
from normprobe.records.non_finite import BrokenTensor, NonFinite
from normprobe.records.norm_curves import NormsMeasure
from normprobe.records.norm_gains import NormGain
from normprobe.records.precision import PrecisionMeasure
from normprobe.records.products import ProductsMeasure
from normprobe.records.smoothness import SmoothnessMeasure


class Growth(Record):
    """Fit of rms ∝ depth^exponent. NaN where there were fewer than four writes or a value was not finite."""

    exponent: float
    interval: tuple[float, float]
    r_squared: float
    writes: int


class StreamState(Record):
    """The stream after one write; `branch` indexes `Stream.branches`.

    Attributes:
        rms_median, rms_p99, rms_max: over tokens, of the token RMS √(mean over features of x²).
        rms_argmax: flat index of the token with the largest RMS; `position` is its index along the sequence.
        abs_max: largest |x|, at feature `abs_argmax_channel`.
        mean, std: over all entries.
        first_rms, other_rms: median token RMS of the first tokens of the samples, and of all others.
        token_cosine: mean cosine between two different tokens of one sample; near 1: tokens collapse (Dong et al.
            2021). NaN with one token.
        stable_rank: ‖X‖²_F / ‖X‖²₂ of the state of up to 32 sampled tokens (Rudelson & Vershynin 2007).
        write_rms: median over tokens of the RMS of the write.
        write_ratio: median over tokens of RMS(write) / RMS(trunk before the add).
        write_share: median over tokens of RMS(write) / RMS(state after the add): how far writes are diluted.
        write_cosine: median over tokens of the cosine between write and trunk; 0 where writes are independent.
        angle: median over tokens of the angle between the trunk before and the state after the add, in radians.
        bf16_loss: what rounding the sum to bfloat16 loses, RMS over up to 32 sampled tokens as a share of the RMS
            of the write.
        finite: whether every element is finite.

    Numbers of the write are NaN where the operation that adds has no operand of its own for it.
    """

    branch: int
    path: str
    block: str
    kind: str
    rms_median: float
    rms_p99: float
    rms_max: float
    rms_argmax: int
    position: int
    abs_max: float
    abs_argmax_channel: int
    mean: float
    std: float
    first_rms: float
    other_rms: float
    token_cosine: float
    stable_rank: float
    write_rms: float
    write_ratio: float
    write_share: float
    write_cosine: float
    angle: float
    bf16_loss: float
    finite: bool = True


class MassiveActivation(Record):
    """A few entries of the stream that are far larger than its median (Sun et al. 2024).

    `first` and `last` index `StreamMeasure.states`; `value` is the largest of these, `ratio` its size over the median
    |x| of the same state, `share` its square over the squared norm of its token there.
    """

    channel: int
    position: int
    value: float
    ratio: float
    share: float
    first: int
    last: int


class Headroom(Record):
    """How often the largest |x| of a stream fits into the largest finite number of a format; below 1 it overflows."""

    float16: float
    bfloat16: float
    float8_e4m3: float
    float8_e5m2: float


class StreamMeasure(Record):
    """Residual stream `stream`, after every write. Padding is left out.

    Attributes:
        entry_rms: median token RMS before the first write.
        growth: fit of the median RMS against the number of writes.
        independent_rms: what the median RMS at the end would be if writes of these sizes were independent of each
            other and of the entry: √(entry² + Σ write²), √L growth for writes of one size (Xiong et al. 2020, lemma 2).
        effective_depth: (Σ w²)² / Σ w⁴ over the RMS w of all writes: the number of writes of one size that are as
            uneven (a participation ratio). L where all are equal, 1 where one is all.
        headroom: of the largest |x| over all states.
    """

    stream: str
    basis: Basis
    entry_rms: float
    states: tuple[StreamState, ...]
    growth: Growth
    independent_rms: float
    effective_depth: float
    headroom: Headroom | None = None
    massive: tuple[MassiveActivation, ...] = ()


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
        uncapped_max: the same before the soft cap; equal where there is none, None where it was not seen.
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
    """All heads of one attention site; `rows` query rows per head were looked at."""

    path: str
    basis: Basis
    rows: int
    heads: tuple[HeadLogits, ...]


class Measurements(Record):
    """Everything that was measured; None or empty where the level did not ask for it."""

    residual: tuple[StreamMeasure, ...] = ()
    attention: tuple[AttentionMeasure, ...] = ()
    norm_gains: tuple[NormGain, ...] = ()
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
        description="parameters and buffers that are not finite; looked for where a value or gradient is not",
    )


Level = Literal["structure", "forward", "backward"]
