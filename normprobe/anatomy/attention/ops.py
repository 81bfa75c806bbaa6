"""Where attention happens: an attention operation, or a softmax of q·kᵀ that weighs values."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from normprobe.anatomy.attention.bounded import NONE, Learned
from normprobe.anatomy.attention.masks import NOTHING, Hidden, MaskReader
from normprobe.anatomy.attention.written import written_softmax
from normprobe.anatomy.flow.along import along, factors
from normprobe.anatomy.flow.ops import CAPS, LIGHT, Role, base
from normprobe.anatomy.flow.sites import op_site
from normprobe.anatomy.flow.steps import Flow, Step
from normprobe.anatomy.flow.walk import argument_value, constant_factor, first_readers, reached
from normprobe.records import OpSite
from normprobe.records.anatomy import QKProduct

_BETWEEN = LIGHT | {Role.ADD, Role.ACT}  # mask, bias, scale, softcap
_REORDER = frozenset(
    f"aten.{name}"
    for name in ("transpose", "permute", "t", "mT", "as_strided", "index", "index_select", "gather", "roll")
)  # moves that may put heads elsewhere
_PASS_ON = LIGHT | {Role.ACT, Role.GATE, Role.POOL, Role.ADD, Role.NORM}  # from the weights of values to the values


@dataclass(frozen=True)
class AttentionOp:
    """One attention operation of the flow.

    `query`, `key` and `value` are values shaped (…, tokens, head_dim); `across` are the axes of the features of key and
    value, which may lie turned. `factor` is what multiplies q·kᵀ after the product (None: not constant). `causal` is
    true where the operation itself hides later keys; `hidden` is what its mask hides of the `places`, (queries, keys).
    `product` is the step of q·kᵀ where that is one of its own, `multiplied` tells where its operands are seen.
    """

    step: Step
    query: int
    key: int
    value: int
    factor: float | None
    learned: Learned
    softcap: float | None
    across: tuple[int, int]
    causal: bool
    hidden: Hidden
    places: tuple[int, int]
    kernel: str
    site: OpSite
    product: int = -1
    multiplied: QKProduct | None = None


def find_attention(flow: Flow) -> list[AttentionOp]:
    """All attention operations in order of time; a softmax that is no attention (a router's) is left out.

    Where no softmax is taken of q·kᵀ, an activation may stand in its place (a sigmoid, a rectifier).
    """
    found = list(_find(flow))
    taken = {op.product for op in found}
    for step in flow.steps:
        op = _weights(flow, step) if step.role is Role.ACT else None
        own = (
            op is not None and op.product not in taken and not flow.steps[op.product].parameters
        )  # weights of an expert
        if op is not None and own and _over_tokens(flow, op):
            taken.add(op.product)
            found.append(op)
    return sorted(found, key=lambda op: op.step.id)


def _find(flow: Flow) -> Iterator[AttentionOp]:
    for step in flow.steps:
        found = None
        if step.role is Role.ATTENTION:
            found = _composite(flow, step) if step.group is not None else _kernel(flow, step)
        elif step.role is Role.SOFTMAX or written_softmax(flow, step):
            found = _weights(flow, step)
        if found is not None and _over_tokens(flow, found):
            yield found


def _over_tokens(flow: Flow, op: AttentionOp) -> bool:
    """Whether tokens are weighed, as far as can be told: neither features by sums over all tokens, nor the parts of one
    token."""
    summed = along(flow, op.query, -1)
    rows, keys = along(flow, op.query, -2), along(flow, op.key, -2 if op.across[0] == -1 else -1)
    if summed is not None and summed.places and not summed.features:
        return False
    return rows is None or keys is None or any(one.places or not one.features for one in (rows, keys))


def _composite(flow: Flow, step: Step) -> AttentionOp | None:
    kernel = flow.trace.calls[step.call].composite
    return _whole(flow, step, _arguments(flow, step), kernel, op_site(flow, step))


def _kernel(flow: Flow, step: Step) -> AttentionOp | None:
    """An attention kernel that was called directly."""
    return _whole(flow, step, _arguments(flow, step), base(step.node.op), op_site(flow, step))


def _arguments(flow: Flow, step: Step) -> dict[str, Any]:
    """The arguments of an operation that is attention as a whole, by name."""
    if step.group is not None:
        return flow.trace.calls[step.call].arguments
    names = [argument.name for argument in step.node.function._schema.arguments]
    return dict(zip(names, step.node.args, strict=False)) | step.node.kwargs


def operands(flow: Flow, step: Step) -> tuple[int, int, int] | None:
    """Query, key and value of an operation that is attention as a whole, by the names of its arguments."""
    arguments = _arguments(flow, step)
    query, key, value = (argument_value(arguments.get(n)) for n in ("query", "key", "value"))
    return None if query is None or key is None or value is None else (query, key, value)


def scaling(flow: Flow, step: Step) -> tuple[int, ...]:
    """The inputs whose scale the outputs of a step without weights have: none of a softmax, the values of attention."""
    if step.role is Role.SOFTMAX:
        return ()
    found = operands(flow, step) if step.role is Role.ATTENTION else None
    return step.inputs if found is None else found[2:]


def _whole(flow: Flow, step: Step, arguments: dict[str, Any], kernel: str, site: OpSite) -> AttentionOp | None:
    """An operation that is attention as a whole."""
    found = operands(flow, step)
    if found is None:
        return None
    query, key, value = found
    scale = arguments.get("scale")
    factor = float(scale) if scale is not None else flow.shape(query)[-1] ** -0.5
    mask = argument_value(arguments.get("attn_mask", arguments.get("attn_bias")))
    hidden = NOTHING if mask is None else MaskReader(flow).given(mask)
    places = (flow.shape(query)[-2], flow.shape(key)[-2])
    causal = bool(arguments.get("is_causal", False))
    cap = arguments.get("softcap")
    return AttentionOp(step, query, key, value, factor, NONE, cap, (-1, -1), causal, hidden, places, kernel, site)


@dataclass
class _Logits:
    """What was found between q·kᵀ and the softmax."""

    product: Step | None = None
    factor: float | None = 1.0
    after_tanh: float | None = None
    learned: Learned = NONE
    shift: Step | None = None  # the subtraction of each row's maximum, which leaves the softmax as it is
    in_order: bool = True  # no step on the way changes the order of heads


def _weights(flow: Flow, step: Step) -> AttentionOp | None:
    """Attention whose weights `step` makes of q·kᵀ."""
    logits = _logits(flow, step)
    product = logits.product
    pair = None if product is None else factors(flow, product)
    weighing = None if pair is None else _weighing(flow, step)
    if product is None or pair is None or weighing is None:
        return None
    values, across = weighing
    factor = logits.factor
    alpha = product.node.kwargs.get("alpha", 1.0)
    if isinstance(alpha, (int, float)) and factor is not None:
        factor *= alpha
    hidden = MaskReader(flow, product.node.id).added(step.inputs[0])
    queries, keys = flow.shape(step.inputs[0])[-2:]
    return AttentionOp(
        step,
        *pair,
        values,
        factor,
        logits.learned,
        logits.after_tanh,
        (-2, across),
        False,
        hidden,
        (queries, keys - (0 if hidden.sinks is None else hidden.sinks[1] - hidden.sinks[0])),
        base(step.node.op),
        op_site(flow, logits.shift or step),
        product.id,
        QKProduct(site=op_site(flow, product), factor=logits.factor) if logits.in_order else None,
    )


def _logits(flow: Flow, softmax: Step) -> _Logits:
    """Walk back from the softmax over masks, biases, scales and a soft cap to the product of q and k."""
    found = _Logits()
    value = softmax.inputs[0]
    while True:
        step = flow.made_by(value)
        if step is None:
            return found
        found.in_order = found.in_order and base(step.node.op) not in _REORDER
        if _mixes_heads(flow, step):
            found.in_order = False
            value = step.inputs[0]
            continue
        if step.role is Role.MATMUL:
            found.product = step if factors(flow, step) is not None else None
            return found
        if step.role not in _BETWEEN:
            return found
        if step.role is Role.SCALE:
            _scaled(flow, step, found)
        elif base(step.node.op) in CAPS:
            found.after_tanh = found.factor
        value = step.inputs[0] if len(step.inputs) == 1 else _summand(flow, step, found)


def _scaled(flow: Flow, step: Step, found: _Logits) -> None:
    constant = constant_factor(flow, step)
    found.factor = None if constant is None or found.factor is None else found.factor * constant
    found.learned = found.learned.times(flow, step)


def _summand(flow: Flow, step: Step, found: _Logits) -> int:
    """The summand that leads to the product; the other one is a bias, a mask, or the row's own maximum."""
    value = _towards_product(flow, step)
    others = [v for v in step.inputs if v != value]
    if base(step.node.op) == "aten.sub" and all(_row_maximum(flow, v, value) for v in others):
        found.shift = step
    return value


def _row_maximum(flow: Flow, value: int, source: int) -> bool:
    """Whether `value` is a maximum over `source`, by way of views."""
    while (step := flow.made_by(value)) is not None and step.role is Role.MOVE and len(step.inputs) == 1:
        value = step.inputs[0]
    return step is not None and base(step.node.op) in ("aten.max", "aten.amax") and step.inputs[0] == source


def _towards_product(flow: Flow, step: Step) -> int:
    """Of a sum's summands, or of what is put side by side, the largest whose nearest weighty maker is a product of two
    signals; else the first."""
    for value in sorted(step.inputs, key=lambda v: -math.prod(flow.shape(v))):
        current = flow.made_by(value)
        while current is not None and current.role in _BETWEEN and flow.floating(current.inputs[0]):
            current = flow.made_by(current.inputs[0])
        if current is not None and current.role is Role.MATMUL and factors(flow, current) is not None:
            return value
    return step.inputs[0]


def _weighing(flow: Flow, softmax: Step) -> tuple[int, int] | None:
    """The values that the softmax's output weighs and the axis of their features, which is −2 where they are the first
    factor; None if no product of two signals follows."""
    todo, seen = list(softmax.outputs), set(softmax.outputs)
    while todo:
        output = todo.pop()
        for step in first_readers(flow, output, None, _PASS_ON):
            pair = factors(flow, step) if step.role is Role.MATMUL else None
            if pair is not None:
                first, second = pair
                return (first, -2) if second in reached(flow, output, _PASS_ON) else (second, -1)
            fresh = [v for v in step.outputs if v not in seen] if _mixes_heads(flow, step) else []
            seen.update(fresh)
            todo += fresh
    return None


def _mixes_heads(flow: Flow, step: Step) -> bool:
    """Whether a product with a weight mixes the heads of a table (batch, heads, queries, keys), as talking heads do."""
    if step.role is not Role.MATMUL or len(step.inputs) != 1 or not step.parameters:
        return False
    sizes = {size for v in step.statics if len(flow.shape(v)) > 1 for size in flow.shape(v)[:2]}
    moved, value = "convolution" in step.node.op, step.inputs[0]
    while True:
        shape = flow.shape(value)
        if len(shape) == 4 and shape[1] in sizes:
            return moved or shape[-1] not in sizes
        maker = flow.made_by(value)
        if maker is None or maker.role is not Role.MOVE or len(maker.inputs) != 1:
            return False
        moved = moved or base(maker.node.op) in ("aten.permute", "aten.transpose")
        value = maker.inputs[0]
