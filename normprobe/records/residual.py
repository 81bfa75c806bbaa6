"""The residual stream after each of its writes."""

from __future__ import annotations

from normprobe.records.base import Record
from normprobe.records.basis import Basis


class Growth(Record):
    """Fit of rms ∝ depth^exponent. NaN where there were fewer than four writes or a value was not finite; `r_squared`
    is NaN too where all values are equal."""

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
        write_rms: median over tokens of the RMS of the write; `write_max` is the largest.
        write_ratio: median over tokens of RMS(write) / RMS(trunk before the add).
        write_share: median over tokens of RMS(write) / RMS(state after the add): how far writes are diluted.
        write_cosine: median over tokens of the cosine between write and trunk, where both are not 0; 0 where writes are
            independent.
        angle: median over tokens of the angle between the trunk before and the state after the add, in radians, where
            the trunk is not 0; over up to 32 sampled tokens where the state is half precision.
        bf16_loss: what rounding the sum to bfloat16 loses, RMS over up to 32 sampled tokens as a share of the RMS
            of the write; `fp16_loss` the same of float16, infinite where the sum overflows.
        input_std: standard deviation over all entries of what the first weights of the branch are given; measured in
            streams without norms that are held at a scale by constants (`Entry`), else None.
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
    write_max: float
    write_ratio: float
    write_share: float
    write_cosine: float
    angle: float
    bf16_loss: float
    fp16_loss: float
    input_std: float | None = None
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


class OutlierChannel(Record):
    """A channel of the stream that is large at most tokens (Dettmers et al. 2022, sec. 4).

    `size` is the median |x| of the channel over up to 32 sampled tokens, `ratio` how often that holds the median of
    these sizes over all channels, both of the state where the ratio is largest. `first` and `last` index
    `StreamMeasure.states`.
    """

    channel: int
    size: float
    ratio: float
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
        entry_cosine: mean cosine between two different tokens there, of up to 32 sampled ones of all samples.
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
    entry_cosine: float
    states: tuple[StreamState, ...]
    growth: Growth
    independent_rms: float
    effective_depth: float
    headroom: Headroom | None = None
    massive: tuple[MassiveActivation, ...] = ()
    outliers: tuple[OutlierChannel, ...] = ()
