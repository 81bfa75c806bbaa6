"""Sums that are written in another way: inside one operation, as an interpolation, over a stack."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import torch

from normprobe.anatomy.flow.mixtures import weighted
from normprobe.anatomy.flow.ops import ACCUMULATING, PIECE, REST, SPREADING, Role, base, classify
from normprobe.anatomy.flow.steps import Flow, append, extra, ref
from normprobe.capture.trace import Node, Ref

_POINTWISE = {"aten.addcmul": "aten.mul.Tensor", "aten.addcdiv": "aten.div.Tensor"}


def accumulates(op: str) -> bool:
    """Whether an operation adds a product, or rows in their places, to `beta` times its argument `self` (1 where it
    takes none): `addmm(x, a, b)`, `addcmul(x, a, b)`, `index_add(x, dim, index, rows)` and their kin."""
    return base(op).rstrip("_") in {*_POINTWISE, *ACCUMULATING, *SPREADING}


def add_sum(flow: Flow, node: Node, signals: frozenset[int]) -> bool:
    """Enter the steps that `node` stands for where it is a sum of signals written in another way; tell whether."""
    ways = (_add_again, _add_accumulating, _add_spread, _add_interpolation, _add_stacked, _add_unit, _add_replaced)
    return len(signals) > 0 and any(add(flow, node, signals) for add in ways)


def _add_again(flow: Flow, node: Node, signals: frozenset[int]) -> bool:
    """A sum of what was added before is that sum, where writes are kept in a list and added up at every read. Two
    trunks may add one branch to one state: a sum counts that is made three times, and what goes on from one."""
    if base(node.op) != "aten.add":
        return False
    if "times added" not in flow.memo:
        flow.memo["times added"] = Counter(_terms(n, n.args) for n in flow.trace.nodes if base(n.op) == "aten.add")
    operands = tuple(Ref(_first(flow, value)) if (value := ref(a)) >= 0 else a for a in node.args)
    known: dict[object, int] = flow.memo.setdefault("sums", {})
    earlier = known.setdefault(_terms(node, operands), node.outputs[0])
    if earlier == node.outputs[0] or (operands == node.args and flow.memo["times added"][_terms(node, node.args)] < 3):
        return False
    append(flow, Role.MOVE, (earlier,), node.outputs, _same(node, earlier))
    return True


def _terms(node: Node, operands: Sequence[object]) -> str:
    """What an addition adds."""
    return repr((operands, node.kwargs))


def _first(flow: Flow, value: int) -> int:
    """The sum that a value is, where it was added before."""
    step = flow.made_by(value)
    again = step is not None and step.node.op == PIECE and step.outputs == (value,)
    return step.inputs[0] if step is not None and again else value


def _same(node: Node, value: int) -> Node:
    """A move for `node`, whose output is a value that there is already."""
    return Node(node.id, PIECE, (value,), node.outputs, node.call, node.ordinal)


def _add_accumulating(flow: Flow, node: Node, signals: frozenset[int]) -> bool:
    """`addmm(x, a, b)`, `addcmul(x, a, b)` or `addcdiv(x, a, b)` with a signal `x` is a product and an add."""
    pointwise = _POINTWISE.get(base(node.op).rstrip("_"))
    if len(signals) < 2 or not (pointwise or base(node.op) in ACCUMULATING) or ref(node.args[0]) not in signals:
        return False
    factors = tuple(dict.fromkeys(v for v in node.inputs[1:] if v in signals))
    if pointwise is None:
        product = extra(flow, node)
        append(flow, Role.MATMUL, factors, (product,), node)
    else:
        product = _computed(flow, node, pointwise, node.args[1:3])
        if (value := node.kwargs.get("value", 1)) != 1:
            product = _computed(flow, node, "aten.mul.Tensor", (Ref(product), float(value)))
    append(flow, Role.ADD, (ref(node.args[0]), product), node.outputs, node)
    return True


def _add_spread(flow: Flow, node: Node, signals: frozenset[int]) -> bool:
    """`index_add` of rows to a signal puts them in their places and adds."""
    if base(node.op) not in SPREADING or not {ref(node.args[0]), ref(node.args[3])} <= signals:
        return False
    spread = extra(flow, node)
    append(flow, Role.MOVE, (ref(node.args[3]),), (spread,), node)
    if (alpha := node.kwargs.get("alpha", 1)) != 1:
        spread = _computed(flow, node, "aten.mul.Tensor", (Ref(spread), float(alpha)))
    append(flow, Role.ADD, (ref(node.args[0]), spread), node.outputs, node)
    return True


def _add_interpolation(flow: Flow, node: Node, signals: frozenset[int]) -> bool:
    """`lerp(x, y, w)`, also written out as x + w·(y − x), is the sum of two products, x·(1 − w) and y·w."""
    lerp = node.op == "aten.lerp.Tensor" and {ref(a) for a in node.args[:2]} <= signals
    operands = node.args[:3] if lerp else _interpolated(flow, node, signals)
    if operands is None:
        return False
    _interpolate(flow, node, *operands)
    return True


def _interpolate(flow: Flow, node: Node, first: Ref, second: Ref, weight: Ref) -> None:
    rest = _computed(flow, node, REST, (first, weight))
    append(flow, Role.ADD, (rest, _computed(flow, node, "aten.mul.Tensor", (second, weight))), node.outputs, node)


def _interpolated(flow: Flow, node: Node, signals: frozenset[int]) -> tuple[Ref, Ref, Ref] | None:
    """x, y and w of a sum x + w·(y − x) in which all three are signals; None where the sum is of another kind."""
    if base(node.op).rstrip("_") != "aten.add" or len(signals) != 2 or node.kwargs.get("alpha", 1) != 1:
        return None
    for first, product in (node.args[:2], node.args[1::-1]):
        maker = flow.made_by(ref(product))
        if maker is None or maker.role is not Role.GATE or base(maker.node.op).rstrip("_") != "aten.mul":
            continue
        for difference, weight in (maker.node.args[:2], maker.node.args[1::-1]):
            taken = flow.trace.producer(ref(difference))
            plain = base(taken.op).rstrip("_") == "aten.sub" and taken.kwargs.get("alpha", 1) == 1
            if plain and taken.args[1] == first and flow.levels.signal(ref(taken.args[0])):
                if flow.consumers[ref(difference)] == [maker.id]:  # then it is a part of this sum, and none by itself
                    flow.steps[flow.producer[ref(difference)]].role = Role.GATE
                return first, taken.args[0], weight
    return None


def _add_stacked(flow: Flow, node: Node, signals: frozenset[int]) -> bool:
    """A sum or mean over the axis on which signals were stacked, weighted perhaps, adds them one after another."""
    parts = weighted(flow, node)
    if len(parts) < 2 or not all(flow.levels.signal(v) for v in parts):
        return False
    scale = 1.0 / len(parts) if base(node.op) == "aten.mean" else 1.0
    total, *others = (_weighed(flow, node, value, weight) for value, weight in parts.items())
    moved = scale != 1 or flow.shape(total) != flow.shape(node.outputs[0])
    for i, value in enumerate(others):
        total = _added(flow, node, total, value, node.outputs[0] if i == len(others) - 1 and not moved else None)
    if scale != 1:
        total = _computed(flow, node, "aten.mul.Tensor", (Ref(total), scale), like=total)
    if moved:
        _computed(flow, node, "aten.reshape.default", (Ref(total), flow.shape(node.outputs[0])), node.outputs[0])
    return True


def _added(flow: Flow, node: Node, total: int, value: int, output: int | None) -> int:
    """The sum of two values within what `node` adds up, `output` where that is given; one that was made before is not
    made again."""
    known: dict[object, int] = flow.memo.setdefault("sums", {})
    earlier = known.get((total, value))
    if earlier is None:
        made = known[total, value] = extra(flow, node, total) if output is None else output
        append(flow, Role.ADD, (total, value), (made,), node, ())
        return made
    if output is not None:
        append(flow, Role.MOVE, (earlier,), (output,), _same(node, earlier))
    return earlier


def _add_unit(flow: Flow, node: Node, signals: frozenset[int]) -> bool:
    """One step of a gated recurrent unit: h' = z·h + (1 − z)·n, and n reads h through the gate r."""
    if node.op != "torch.gru_cell" or not set(node.inputs[:2]) <= signals:
        return False
    (given, state), weights = node.inputs[:2], node.inputs[2:]
    gates, new = (extra(flow, node) for _ in range(2))
    append(flow, Role.MATMUL, (given, state), (gates,), node, weights)
    reset, update = (_computed(flow, node, "aten.sigmoid.default", (Ref(gates),)) for _ in range(2))
    kept = _computed(flow, node, "aten.mul.Tensor", (Ref(state), Ref(reset)))
    append(flow, Role.MATMUL, (given, kept), (new,), node, weights)
    bent = _computed(flow, node, "aten.tanh.default", (Ref(new),))
    _interpolate(flow, node, Ref(bent), Ref(state), Ref(update))
    return True


def _add_replaced(flow: Flow, node: Node, signals: frozenset[int]) -> bool:
    """a + (b − a), also by way of views and detached, is b: gradients alone go through a (a code that replaces it)."""
    if base(node.op).rstrip("_") != "aten.add" or len(signals) != 2 or node.kwargs.get("alpha", 1) != 1:
        return False
    for first, rest in (node.args[:2], node.args[1::-1]):
        taken = flow.trace.producer(ref(rest))
        while base(taken.op) in ("aten.detach", "aten.alias"):
            taken = flow.trace.producer(taken.inputs[0])
        plain = base(taken.op).rstrip("_") == "aten.sub" and taken.kwargs.get("alpha", 1) == 1
        if plain and taken.args[1] == first and flow.levels.signal(ref(taken.args[0])):
            value = ref(taken.args[0])
            append(flow, Role.MOVE, (value,), node.outputs, _same(node, value))
            return True
    return False


def _weighed(flow: Flow, node: Node, value: int, weight: float) -> int:
    """A summand with its weight."""
    return value if weight == 1 else _computed(flow, node, "aten.mul.Tensor", (Ref(value), weight), like=value)


def _computed(
    flow: Flow, node: Node, op: str, operands: Sequence[object], output: int | None = None, like: int | None = None
) -> int:
    """What `node` computes by `op` on its way to its output, or at the end of it."""
    made = extra(flow, node, like) if output is None else output
    values = tuple(v for a in operands if (v := ref(a)) >= 0)
    function = getattr(torch.ops.aten, op.split(".")[1]) if op != REST else None
    part = Node(node.id, op, values, (made,), node.call, node.ordinal, tuple(operands), function=function)
    inputs = tuple(dict.fromkeys(v for v in values if flow.levels.signal(v)))
    append(flow, classify(part, frozenset(inputs)), inputs, (made,), part)
    return made
