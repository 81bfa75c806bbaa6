"""What an ATen operation does to a signal, as far as reading the data flow needs it. Unknown operations are heavy."""

from __future__ import annotations

from enum import Enum
from functools import cache

import torch
from torch.utils import _pytree as pytree

from normprobe.capture.trace import Node, Ref, Trace
from normprobe.norms.precision import FUSED, NAMESPACES


class Role(Enum):
    """The part an operation plays on the signal's way."""

    SOURCE = "source"  # a float input, or a table lookup: elements that are no signal, which a signal chooses
    MOVE = "move"  # views, copies, casts, gathers: elements are moved, not changed
    SCALE = "scale"  # multiplied by something that is no signal
    SHIFT = "shift"  # something that is no signal is added
    POOL = "pool"  # means and sums
    REDUCE = "reduce"  # other statistics over some axes
    ADD = "add"  # two signals are added
    GATE = "gate"  # two signals meet pointwise in another way
    ACT = "act"  # pointwise non-linearity
    NORM = "norm"
    ATTENTION = "attention"
    SOFTMAX = "softmax"
    MATMUL = "matmul"  # matrix product or convolution
    HEAVY = "heavy"  # anything else


SAMPLERS = frozenset({"aten.grid_sampler_2d", "aten.grid_sampler_3d"})
CAPS = frozenset(f"aten.{n}" for n in ("tanh", "tanh_", "hardtanh", "hardtanh_"))  # bounded, and slope 1 at 0
LIGHT = frozenset({Role.MOVE, Role.SCALE, Role.SHIFT})
WEIGHTY = frozenset({Role.ATTENTION, Role.SOFTMAX, Role.MATMUL, Role.HEAVY})

ALIAS = "normprobe.alias"  # a tensor read again after a part of it was written in place
PIECE = "normprobe.piece"  # one tensor of a concatenation, taken out again as it went in
REST = "normprobe.rest"  # x·(1 − w), what an interpolation lerp(x, y, w) keeps of x
ACCUMULATING = frozenset({"aten.addmm", "aten.baddbmm", "aten.addmv", "aten.addbmm"})
DETRENDED = "normprobe.detrended"  # what is left of x when a mean over its neighbours is taken off
SPREADING = frozenset(f"aten.{n}" for n in ("scatter_add", "scatter_add_", "index_add", "index_add_"))
_MOVES = frozenset(
    [
        *SPREADING,
        ALIAS,
        PIECE,
        "aten.clone",
        "aten.contiguous",
        "aten._to_copy",
        "aten.detach",
        "aten.lift_fresh",
        "aten.copy_",
        "aten.copy",
        "aten.cat",
        "aten.stack",
        "aten.index",
        "aten.index_select",
        "aten.gather",
        "aten.constant_pad_nd",
        "aten.flip",
        "aten.roll",
        "aten.repeat",
        "aten.index_put",
        "aten.index_put_",
        "aten._index_put_impl_",
        "aten.scatter",
        "aten.scatter_",
        "aten.masked_fill",
        "aten.masked_fill_",
        "aten.where",
        "aten.masked_scatter",
        "aten.masked_scatter_",
        "aten.native_dropout",
        "aten._unsafe_view",
        "aten.reshape",
        "aten.view_as_real",
        "aten.view_as_complex",
        "aten._reshape_alias",
        "aten.slice_scatter",
        "aten.select_scatter",
        "aten.unfold",
        "aten._unsafe_index",
        "aten.index_copy",
        "aten.index_copy_",
        "aten.masked_select",
        "aten.expand_copy",
        "aten.squeeze_copy",
        "aten.tril",
        "aten.triu",
        "aten.repeat_interleave",
        "aten.slice_copy",
        "aten.alias",
        "aten.as_strided_",
        "aten.squeeze_",
        "aten.unsqueeze_",
        "aten.transpose_",
        "aten._conj",
        "aten.fill",
        "aten.reflection_pad1d",
        "aten.split_with_sizes_copy",
        "aten.pixel_shuffle",
        "aten.pixel_unshuffle",
        "aten.channel_shuffle",
    ]
)
_MATMULS = frozenset(
    [
        "aten.mm",
        "aten.bmm",
        "aten.addmm",
        "aten.baddbmm",
        "aten.matmul",
        "aten.linear",
        "aten.convolution",
        "aten._convolution",
        "aten.dot",
        "aten.mv",
        "aten.addmv",
        "aten.einsum",
        "aten._int_mm",
        "aten.mkldnn_convolution",
        "aten.convolution_overrideable",
        "aten.addbmm",
        "aten._grouped_mm",
        "aten._trilinear",
        "quantized.linear",
        "quantized.linear_dynamic",
        "quantized.linear_relu",
        "aten.cudnn_convolution",
    ]
)
_POOLS = frozenset(
    [
        "aten.mean",
        "aten.sum",
        "aten.avg_pool1d",
        "aten.avg_pool2d",
        "aten.avg_pool3d",
        "aten.adaptive_avg_pool1d",
        "aten._adaptive_avg_pool2d",
        "aten._adaptive_avg_pool3d",
    ]
)
MAXIMA = frozenset(
    f"aten.{n}"
    for n in (
        "max",
        "amax",
        "max_pool2d_with_indices",
        "max_pool3d_with_indices",
        "adaptive_max_pool2d",
        "adaptive_max_pool3d",
        "fractional_max_pool2d",
        "fractional_max_pool3d",
        "median",
        "nanmedian",
    )
)  # and medians: one of the elements itself
_REDUCES = frozenset(
    [
        *MAXIMA,
        "aten.var",
        "aten.var_mean",
        "aten.std",
        "aten.std_mean",
        "aten.linalg_vector_norm",
        "aten.norm",
        "aten.amin",
        "aten.min",
        "aten.mode",
        "aten.kthvalue",
        "aten.logsumexp",
    ]
)
_ACTIVATIONS = frozenset(  # pointwise, though torch does not mark them so
    f"aten.{n}" for n in ("hardswish", "gelu", "mish", "relu6", "prelu", "_prelu_kernel", "threshold", "abs")
)
_FUSED_NORMS = frozenset(f"aten.{name}" for name in (*FUSED, "layer_norm", "rms_norm"))
ADDS = frozenset(["aten.add", "aten.add_", "aten.sub", "aten.sub_", "aten.rsub"])
JOINS = frozenset({"aten.cat", "aten.stack"})
PRODUCTS = frozenset({REST, "aten.mul", "aten.mul_", "aten.div", "aten.div_"})
_CHOOSERS = frozenset({"index", "indices", "mask", "condition"})  # arguments in the schemas of moves
SCALES = PRODUCTS | {"aten.neg", "aten.neg_"}
SOFTMAXES = frozenset(
    ["aten._softmax", "aten.softmax", "aten._safe_softmax", "aten.special_softmax", "aten._log_softmax"]
)
_ATTENTIONS = "scaled_dot_product", "flash_attention", "efficient_attention"
_SETTLED = {
    Role.MOVE: _MOVES,
    Role.MATMUL: _MATMULS,
    Role.SOFTMAX: SOFTMAXES,
    Role.POOL: _POOLS,
    Role.REDUCE: _REDUCES,
    Role.NORM: _FUSED_NORMS,
}


@cache
def base(op: str) -> str:
    """The operator's name without its overload: `aten.add.Tensor` gives `aten.add`."""
    return ".".join(op.split(".")[:2])


def foreign(op: str) -> bool:
    """Whether an operator is not torch's own, so that only its behaviour can tell what it does."""
    return "." in op and op.partition(".")[0] not in NAMESPACES and not op.startswith("torch.")


def joined_axis(node: Node, rank: int) -> int:
    """The axis on which a cat, a stack or an unbind works."""
    return int(node.args[1] if len(node.args) > 1 else node.kwargs.get("dim", 0)) % rank


def slides(node: Node) -> bool:
    """Whether an operation is a mean over a window that slides on by one: a convolution with fixed weights."""
    return "aten.avg_pool" in node.op and len(node.args) > 2 and bool(node.args[2]) and set(node.args[2]) == {1}


def classify(node: Node, signals: frozenset[int]) -> Role:
    """The role of `node`, a recorded operation that reads the values `signals` that carry signal (at least one)."""
    settled = Role.MOVE if getattr(node.function, "is_view", False) else _settled(node.op)
    if settled is Role.MOVE and _chosen_by(node) >= signals:
        return Role.SOURCE
    if settled is not None:
        return Role.HEAVY if settled is Role.POOL and slides(node) else settled
    name = base(node.op)
    if node.op == "aten.lerp.Scalar" and len(signals) > 1:
        return Role.ADD
    repeated = sum(value in signals for value in node.inputs) > len(signals)
    if name in ADDS:
        return Role.ADD if len(signals) > 1 else Role.SCALE if repeated else Role.SHIFT
    if name in SCALES:
        return _product(node, name, signals, repeated)
    if name == "aten.addcmul" and len(signals) == 1 and not repeated:  # b + w·x
        return Role.SCALE
    if name.rstrip("_") in _ACTIVATIONS:
        return Role.ACT
    if torch.Tag.pointwise in getattr(node.function, "tags", ()):
        return Role.ACT if len(signals) == 1 else Role.GATE
    return Role.HEAVY


def _chosen_by(node: Node) -> frozenset[int]:
    """The values that only tell an operation which elements to take or where to put them: indices and masks."""
    arguments = getattr(getattr(node.function, "_schema", None), "arguments", ())
    given = [*zip((a.name for a in arguments), node.args, strict=False), *node.kwargs.items()]
    told = [leaf for name, each in given if name in _CHOOSERS for leaf in pytree.tree_leaves(each)]
    return frozenset(leaf.value for leaf in told if isinstance(leaf, Ref))


@cache
def _settled(op: str) -> Role | None:
    """The role that an operation has whatever it reads; None where that decides."""
    name = base(op)
    if not foreign(name) and any(word in name for word in _ATTENTIONS):
        return Role.ATTENTION
    return next((role for role, names in _SETTLED.items() if name in names), None)


def multiplies(node: Node) -> bool:
    """Whether an operation is a matrix product or a convolution."""
    return _settled(node.op) is Role.MATMUL


def sums_squares(trace: Trace, node: Node) -> bool:
    """Whether a product multiplies each row of a signal by itself: one sum of squares for each."""
    rows = base(node.op) == "aten.bmm" and trace.values[node.outputs[0]].shape[-2:] == (1, 1)
    return rows and len({unmoved(trace, v) for v in node.inputs}) == 1


def unmoved(trace: Trace, value: int) -> int:
    """The value behind views and copies."""
    while True:
        maker = trace.producer(value)
        if not maker.inputs or classify(maker, frozenset(maker.inputs[:1])) is not Role.MOVE:
            return value
        value = maker.inputs[0]


def _product(node: Node, name: str, signals: frozenset[int], repeated: bool) -> Role:
    if len(signals) > 1:
        return Role.GATE
    if repeated:
        return Role.ACT
    first = node.args[0]
    divides_by_signal = name.startswith("aten.div") and not (isinstance(first, Ref) and first.value in signals)
    return Role.ACT if divides_by_signal else Role.SCALE
