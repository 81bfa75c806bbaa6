"""The Anatomy: what a model is built of, as read from its recorded data flow."""

from __future__ import annotations

from itertools import groupby
from typing import Literal, get_args

from pydantic import Field

from normprobe.records.base import Record
from normprobe.records.norms import NormKind, NormSite
from normprobe.records.sites import OpSite
from normprobe.records.weights import Reparametrization, WeightSite

Placement = Literal["pre", "post", "sandwich", "output", "deepnorm", "preact", "postact", "none", "unknown"]
Topology = Literal["ordinary", "parallel_streams", "reversible", "gated", "long_skips"]
SkipKind = Literal["identity", "projection", "pooling", "gate", "mixture"]
BranchKind = Literal[
    "attention",
    "linear_attention",
    "cross_attention",
    "mlp",
    "moe",
    "ssm",
    "recurrent",
    "conv",
    "other",
]
LAYER_KINDS: frozenset[BranchKind] = frozenset(get_args(BranchKind)) - {"conv", "other"}  # known whole layers


class Entry(Record):
    """Where a branch reads the stream by weights without a norm before them.

    Attributes:
        scale: the constant factor on the way from the trunk to them, activations and poolings passed; None where it is
            not constant, or not one for all that read the trunk.
        site: the first product with weights; `operand` says which of its two factors is the signal.
    """

    scale: float | None
    site: OpSite
    operand: Literal[0, 1] = 0


class BranchScale(Record):
    """Factor on the branch before it is added: a constant, or a learned scalar, channel vector or gate.

    Attributes:
        value: what a constant or scalar multiplies by, all factors together; None where it is not one number.
        parameter: a parameter that a learned factor is computed from.
    """

    kind: Literal["none", "constant", "scalar", "channel", "gate"] = "none"
    value: float | None = None
    parameter: str | None = None


class Branch(Record):
    """One write to a residual stream.

    Attributes:
        path: module where the add runs.
        block: repeated container that the branch belongs to.
        layer: number of the block in the stream, from 0, where no modules tell the blocks apart and the branches
            repeat one sequence of kinds; None elsewhere: there it is `block` and the run of its add.
        readers: parameters of the first heavy operations on the stream, biases included; also those inside earlier
            branches whose results this one takes by another way than the stream (shared keys and values).
        writers: parameters of the last heavy operations before the add, biases included.
        inner_norms: the norms between the read and the add besides `pre_norm` and `output_norm` and those beside them:
            on queries and keys, on the inner features of an MLP.
        normed_inside: whether every way of the signal through the branch passes a norm that sets its size for each
            sample alone, wherever in the branch.
        parameters: every parameter used between the read and the add.
        recipe: a number that those branches of one kind share in a stream that run the same operations as often, norms
            and moves apart; None where it was not read.
        entry: where it reads the stream without a norm before its first weights; None where a norm or something else
            than an activation stands there.
        skip_scale: constant factor on the trunk at this add; None where it is no constant.
        skip: what the trunk passes on its way to this add besides constants: weights of its own, a pooling, a gate, a
            mixture of parallel copies.
        add: where the add happens, `trunk` (0 or 1) says which operand is the trunk.
        apart: whether trunk and write come to that operation as operands of their own; false where it computes them
            itself, as in an interpolation or in a sum over a stack.
        tapped: whether the output takes features off the stream behind this add, as others follow: a way to it passes
            none of these. Not told where several trunks run side by side.
        feature_axis: the axis of the features in the sum (-1, or 1 for channels-first maps); None where it could not
            be told: nothing is measured there.
    """

    path: str
    block: str
    layer: int | None = None
    kind: BranchKind
    placement: Placement
    parallel: bool = False
    pre_norm: str | None = None
    output_norm: str | None = None
    post_norm: str | None = None
    readers: tuple[str, ...] = ()
    writers: tuple[str, ...] = ()
    inner_norms: tuple[str, ...] = ()
    normed_inside: bool = False
    parameters: tuple[str, ...] = ()
    recipe: int | None = None
    entry: Entry | None = None
    skip_scale: float | None = 1.0
    skip: SkipKind = "identity"
    branch_scale: BranchScale = BranchScale()
    add: OpSite
    trunk: Literal[0, 1] = 0
    apart: bool = True
    tapped: bool = False
    feature_axis: int | None = -1

    @property
    def place(self) -> str:
        """Where it adds: the module, or the operation where one module is several blocks."""
        return self.path if self.layer is None else self.add.place


class RawEnd(Record):
    """What a stream's end goes to raw, where it needs a norm there and has none: `reader` is the first that reads it,
    or, where the stream itself is `returned` (pooled perhaps), the name of that output. `pooled` says that every way to
    the head begins with a mean or sum over tokens; `later` is the norm that every way to the head passes behind weights
    and something that is not linear, as in a head of several layers."""

    reader: str
    returned: bool = False
    pooled: bool = False
    later: str | None = None


class Stream(Record):
    """One residual stream: `depth` writes to a trunk of `width` features at its start.

    `widths` are its widths from first to last, more than one where skips are projected.
    `feature_axis` is the axis of the features in most of the stream's tensors (-1, or 1 for channels-first maps); None,
    as `width` is, where it could not be told.
    `final_norm_reason` says why `final_norm` is null where that is no fault, or what was found; `raw_end` tells what
    stands there in place of a norm that is missing.
    `input_multiplier` is the constant factor between the source of the stream and its first read; None: not constant.
    `topology` tells an unusual residual path: "parallel_streams" (`copies` of the trunk, mixed by small matrices or
    each given its share of what a branch writes: hyper-connections, AltUp), "reversible" (two trunks, each written by
    branches that read the other), "gated" (the skip itself is scaled by a gate: highway), "long_skips" (earlier states
    of the trunk are added again, or put beside it and drawn into one with it).
    `source` is the parameter whose rows the stream begins with, where they come to it by moves and factors alone.
    `unskipped` are the last weights on the way from this stream's end to the start of the next one, where that is made
    by weights alone and no skip goes past them, though one would fit.
    `needs_final_norm` is None where it could not be decided; `final_norm_reason` then says why.
    `raw_heads` are those of the `raw_readers` that are heads themselves: products with weights that make an output of
    the model, with activations and further products at most behind them.
    """

    name: str
    width: int | None
    widths: tuple[int, ...] = ()
    depth: int
    placement: Placement | Literal["mixed"]
    parallel: bool = False
    entry_norm: str | None = None
    final_norm: str | None = None
    needs_final_norm: bool | None = None
    final_norm_reason: str = ""
    raw_end: RawEnd | None = None
    raw_readers: tuple[str, ...] = ()
    raw_heads: tuple[str, ...] = ()
    input_multiplier: float | None = 1.0
    source: str | None = None
    unskipped: tuple[str, ...] = ()
    feature_axis: int | None = -1
    topology: Topology = "ordinary"
    copies: int = 1
    branches: tuple[Branch, ...] = ()

    def blocks(self) -> list[tuple[Branch, ...]]:
        """The branches of each run of a block, in order."""
        return [tuple(group) for _, group in groupby(self.branches, key=_run)]

    def place(self, branch: Branch) -> str:
        """Where `branch` is: its block, or its add where no module is that block alone."""
        return branch.block if branch.layer is None else branch.place


def _run(branch: Branch) -> tuple[str, int] | int:
    return (branch.block, branch.add.execution) if branch.layer is None else branch.layer


class QKNorm(Record):
    """Norms on query and key. `rope` says whether they come before or after the rotary embedding.

    `axis` is what one statistic is taken of: the features of one `head` (or some of them), the `full` features of
    several heads, single features of several `heads`, or several `tokens`.
    """

    kind: NormKind
    axis: Literal["head", "full", "heads", "tokens", "unknown"]
    query: str | None = None
    key: str | None = None
    rope: Literal["before", "after", "none", "unknown"] = "none"


class HeadRows(Record):
    """The rows (output features) of `parameter` that feed each head, as half-open ranges `[start, stop)` per head."""

    parameter: str
    axis: int = 0
    heads: tuple[tuple[tuple[int, int], ...], ...] = ()


class QKProduct(Record):
    """Where q·kᵀ is an operation of its own: its last two operands are the queries and the keys of all heads, features
    on the last axis of the first and the last but one of the second.

    `factor` is what multiplies the product on its way to the softmax (None: not constant).
    """

    site: OpSite
    factor: float | None = None


class AttentionSite(Record):
    """One attention operation. `scale` is the factor on q·kᵀ in force wherever it is applied (None: not constant).
    `scale_bounded` says of a learned factor whether something on the way from its parameters holds it under a largest
    value (a clamp, a sigmoid); None where there is none.

    `causal` says that no query sees a later key; None where the mask could not be read. `window` is how many keys a
    causal query sees at most, its own included, or how far another one sees to each side; None where the recorded
    input is not longer than that, or the places seen are no band. `sinks` says that the softmax has logits of no key,
    `sink_columns` which of its columns these are, as a half-open range at one end (None: not known).
    `tokens` are how many queries and keys each head has in the recorded input.
    `biased` says that something besides a mask is added to the scaled q·kᵀ before the softmax (ALiBi, relative
    positions), so that the logits are more than q·k. `site` is where the logits, or q and k, are seen; `product` where
    q and k are multiplied before logits that are seen, if the order of heads stays what it is there.
    """

    path: str
    heads: int
    kv_heads: int
    head_dim: int
    scale: float | None = None
    scale_parameter: str | None = None
    scale_bounded: bool | None = None
    softcap: float | None = None
    causal: bool | None = None
    window: int | None = None
    tokens: tuple[int, int] | None = None
    sinks: bool = False
    sink_columns: tuple[int, int] | None = None
    cross: bool = False
    biased: bool = False
    kernel: str = "unknown"
    qk_norm: QKNorm | None = None
    columns: dict[Literal["q", "k", "v"], HeadRows] = Field(default_factory=dict)
    site: OpSite
    product: QKProduct | None = None


class Head(Record):
    """The readout: the parameter that maps the stream to the first returned tensor. `logit_multiplier` is the constant
    factor on its product in force, wherever it is applied (None: not constant): m in c·tanh(m·logits / c)."""

    path: str
    logit_multiplier: float | None = 1.0
    softcap: float | None = None
    tied_to: str | None = None


class Anatomy(Record):
    """Everything that was read from the recorded data flow."""

    norms: tuple[NormSite, ...] = ()
    streams: tuple[Stream, ...] = ()
    attention: tuple[AttentionSite, ...] = ()
    reparametrizations: tuple[Reparametrization, ...] = ()
    head: Head | None = None
    weights: tuple[WeightSite, ...] = ()

    def norm(self, path: str) -> NormSite | None:
        """The norm at `path`, or None."""
        return next((n for n in self.norms if n.path == path), None)

    def held_by_constants(self, stream: Stream) -> bool:
        """Whether constants in place of norms hold the scale of `stream`: no branch has a norm, and one is written
        through a factor and reads through a constant or by standardised weights (Brock et al. 2021). A constant on the
        way in alone may be the gain of an activation."""
        if any(branch.pre_norm or branch.output_norm or branch.post_norm for branch in stream.branches):
            return False
        standardised = {one.parameter for one in self.reparametrizations if one.kind == "weight_standardization"}
        return any(
            branch.entry.scale not in (None, 1.0) or not standardised.isdisjoint(branch.readers)
            for branch in stream.branches
            if branch.entry is not None and branch.branch_scale.kind in ("constant", "scalar")
        )
