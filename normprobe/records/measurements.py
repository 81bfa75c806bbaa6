"""What was measured. Each group says its unit, dtype, how many values it stands on, and whether it is exact."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from normprobe.records.base import Record


class Basis(Record):
    """What a group of numbers stands on.

    Attributes:
        unit: unit of the values ("1": the stream's own unit, "nat", "logit").
        dtype: dtype of the tensors that were measured; all statistics are taken in float32 or wider.
        count: number of tokens, rows or elements behind each value.
        exact: False where a seeded sample was taken.
    """

    unit: str
    dtype: str
    count: int
    exact: bool = True


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
        write_ratio: median over tokens of RMS(branch) / RMS(trunk before the add).
        finite: whether every element is finite.
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
    write_ratio: float
    finite: bool = True


class MassiveActivation(Record):
    """A few entries of the stream that are far larger than its median (Sun et al. 2024).

    `first` and `last` index `StreamMeasure.states`; `ratio` is |max| over the median |x| of the same state.
    """

    channel: int
    position: int
    value: float
    ratio: float
    first: int
    last: int


class StreamMeasure(Record):
    """Residual stream `stream`, after every write."""

    stream: str
    basis: Basis
    entry_rms: float
    states: tuple[StreamState, ...]
    growth: Growth
    massive: tuple[MassiveActivation, ...] = ()


class HeadLogits(Record):
    """Attention logits of one head, after scale and mask, before softmax.

    Attributes:
        sampled_max: largest logit over the sampled query rows.
        bound: an upper bound on every |logit| over all rows and keys: max|q|·max|k|·|scale| plus the largest
            |mask bias| where q and k were seen; the largest |logit| itself where the logits were.
        std: standard deviation of the unmasked logits in the sampled rows.
        entropy: mean row entropy over ln(number of unmasked keys), in [0, 1]; rows with one key are left out.
        saturated: share of sampled rows whose largest probability exceeds 0.99 (rows with one key left out).
        first_token: mean probability on the first key.
    """

    head: int
    sampled_max: float
    bound: float
    std: float
    entropy: float
    saturated: float
    first_token: float


class AttentionMeasure(Record):
    """All heads of one attention site; `rows` query rows per head were looked at."""

    path: str
    basis: Basis
    rows: int
    heads: tuple[HeadLogits, ...]


class BranchGradient(Record):
    """Gradient of one branch: L2 norm over all its parameters, and RMS of the gradient that reaches its add."""

    stream: str
    branch: int
    path: str
    kind: str
    parameter_norm: float
    activation_rms: float
    parameters: int


class GradientMeasure(Record):
    """Gradients of `loss` by depth. `last_to_first` is the ratio of parameter norms of the last to the first branch."""

    loss: str
    value: float
    basis: Basis
    branches: tuple[BranchGradient, ...]
    last_to_first: float
    slope: float


class Measurements(Record):
    """Everything that was measured; None or empty where the level did not ask for it."""

    residual: tuple[StreamMeasure, ...] = ()
    attention: tuple[AttentionMeasure, ...] = ()
    gradients: GradientMeasure | None = None
    output_finite: bool | None = None
    first_non_finite: str | None = Field(
        default=None, description="place of the first operation whose output was not finite"
    )


Level = Literal["structure", "forward", "backward"]
