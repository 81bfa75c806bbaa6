"""The signal's way through the model: one step per operation on a signal, norms and attention as single steps."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from normprobe.anatomy.flow.levels import Levels
from normprobe.anatomy.flow.ops import ADDS, PIECE, REST, SCALES, SPREADING, Role, base, classify, sums_squares
from normprobe.anatomy.flow.pieces import pieces
from normprobe.anatomy.flow.statics import Statics
from normprobe.capture.trace import Node, Ref, Trace

_PICKS = frozenset({"aten.index", "aten.index_select", "aten.gather"})
_ACCUMULATING = frozenset({"aten.addmm", "aten.baddbmm", "aten.addmv", "aten.addbmm"})
_COPIES = frozenset({"aten.copy_", "aten.copy"})


@dataclass(frozen=True)
class Group:
    """Nodes that make one step: a norm (`norm` numbers its site) or an attention operation (`call` is its call)."""

    role: Role
    nodes: frozenset[int]
    main: int
    call: int
    norm: int = -1


@dataclass(slots=True)
class Step:
    """One operation on a signal.

    `inputs` are the distinct signals it reads (the main one first), `statics` its other tensor arguments,
    `parameters` those that reach it without passing a signal, rows that a signal picks apart (of a product without any,
    the buffers), `node` the recorded operation (the last of a group).
    """

    id: int
    role: Role
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    statics: tuple[int, ...]
    parameters: tuple[str, ...]
    node: Node
    call: int
    group: Group | None = None


@dataclass
class Flow:
    """All steps in order of time, with who makes and who reads each value."""

    trace: Trace
    levels: Levels
    statics: Statics
    steps: list[Step] = field(default_factory=list)
    producer: dict[int, int] = field(default_factory=dict)
    consumers: defaultdict[int, list[int]] = field(default_factory=lambda: defaultdict(list))
    extra_shapes: dict[int, tuple[int, ...]] = field(default_factory=dict)
    outputs: dict[int, str] = field(default_factory=dict)
    pieces: dict[int, int] = field(default_factory=dict)  # tensors taken out of a concatenation as they went in
    memo: dict[Any, Any] = field(default_factory=dict)  # answers that places of one build share

    def made_by(self, value: int) -> Step | None:
        """The step that makes `value`; None for an input of the model."""
        index = self.producer.get(value)
        return None if index is None else self.steps[index]

    def readers(self, value: int) -> list[Step]:
        """The steps that read `value`."""
        return [self.steps[i] for i in self.consumers[value]] if value in self.consumers else []

    def shape(self, value: int) -> tuple[int, ...]:
        """Shape of `value`."""
        if value in self.extra_shapes:
            return self.extra_shapes[value]
        return self.trace.values[value].shape

    def floating(self, value: int) -> bool:
        """Whether `value` holds floating-point or complex numbers."""
        if value in self.extra_shapes:
            return True
        dtype = self.trace.values[value].dtype
        return dtype.is_floating_point or dtype.is_complex

    def path(self, step: Step) -> str:
        """Path of the module in whose forward the step ran."""
        return self.trace.calls[step.call].path


def build(trace: Trace, levels: Levels, statics: Statics, groups: Sequence[Group]) -> Flow:
    """The flow of `trace` with the nodes of each group drawn together."""
    flow = Flow(trace, levels, statics, pieces=pieces(trace))
    member = {node: group for group in groups for node in group.nodes}
    last = {max(group.nodes): group for group in groups if group.nodes}
    for node in trace.nodes:
        if node.id in last:
            _add_group(flow, last[node.id], node)
        elif node.id not in member and any(levels.signal(v) for v in node.outputs):
            _add_node(flow, node)
    flow.outputs = {value: name for name, value in reversed(trace.outputs)}
    return flow


def _add_node(flow: Flow, node: Node) -> None:
    signals = frozenset(v for v in node.inputs if flow.levels.signal(v))
    signals -= _masks(flow, node, signals) | _overwritten(node, signals) | _rows(flow, node, signals)
    if not signals:
        role = Role.SOURCE
    elif base(node.op) in _ACCUMULATING and len(signals) > 1 and _ref(node.args[0]) in signals:
        _add_accumulating(flow, node, signals)
        return
    elif base(node.op) == "aten.addcmul" and _ref(node.args[0]) in signals and len(signals) > 1:
        _add_accumulating(flow, node, signals, Role.SCALE if len(signals) == 2 else Role.GATE)
        return
    elif base(node.op) in SPREADING and {_ref(node.args[0]), _ref(node.args[3])} <= signals:
        _add_accumulating(flow, node, frozenset({_ref(node.args[3])}), Role.MOVE)
        return
    elif node.op == "aten.lerp.Tensor" and {_ref(a) for a in node.args[:2]} <= signals:
        _add_interpolation(flow, node, signals)
        return
    else:
        role = Role.POOL if sums_squares(flow.trace, node) else classify(node, signals)
    inputs = tuple(dict.fromkeys(v for v in node.inputs if v in signals))
    if not all(v in flow.pieces and flow.levels.signal(flow.pieces[v]) for v in node.outputs):
        _append(flow, role, inputs, node.outputs, node)
        return
    for output in node.outputs:
        piece = flow.pieces[output]
        _append(flow, role, (piece,), (output,), Node(node.id, PIECE, (piece,), (output,), node.call, node.ordinal))


def _masks(flow: Flow, node: Node, signals: frozenset[int]) -> frozenset[int]:
    """Factors that only spread over the other one and come from inputs without passing a parameter: masks of floats."""
    if base(node.op) not in ("aten.mul", "aten.mul_") or len(signals) != 2:
        return frozenset()
    small, large = sorted(signals, key=lambda v: math.prod(flow.shape(v)))
    spread = math.prod(flow.shape(small)) < math.prod(flow.shape(large))
    return frozenset({small}) if spread and flow.levels.raw(small) and not flow.levels.raw(large) else frozenset()


def _rows(flow: Flow, node: Node, signals: frozenset[int]) -> frozenset[int]:
    """Summands and factors that are rows of parameters, picked by a signal (the biases of the experts that a router
    chose), beside another one that is not: the signal only says which of them count."""
    if base(node.op) not in ADDS | SCALES:
        return frozenset()
    picks = {v: _pick(flow, v) for v in signals}
    rows = frozenset(v for v, step in picks.items() if step is not None and step.inputs and step.parameters)
    return rows if rows < signals else frozenset()


def _overwritten(node: Node, signals: frozenset[int]) -> frozenset[int]:
    """What a copy replaces as a whole by another signal."""
    old, new = (_ref(node.args[0]), _ref(node.args[1])) if base(node.op) in _COPIES else (-1, -1)
    return frozenset({old}) if new in signals and new != old else frozenset()


def _add_accumulating(flow: Flow, node: Node, signals: frozenset[int], role: Role = Role.MATMUL) -> None:
    """`addmm(x, a, b)` or `addcmul(x, a, b)` with a signal `x` is a product and an add; `index_add` of rows to `x` puts
    them in their places and adds."""
    accumulator, product = _ref(node.args[0]), _extra(flow, node)
    factors = tuple(dict.fromkeys(v for v in node.inputs[1:] if v in signals))
    _append(flow, role, factors, (product,), node)
    _append(flow, Role.ADD, (accumulator, product), node.outputs, node)


def _add_interpolation(flow: Flow, node: Node, signals: frozenset[int]) -> None:
    """`lerp(x, y, w)` is the sum of two products, x·(1 − w) and y·w."""
    products = []
    for operand, op in zip(node.args[:2], (REST, "aten.mul.Tensor"), strict=True):
        product = _extra(flow, node)
        values = tuple(v for a in (operand, node.args[2]) if (v := _ref(a)) is not None)
        part = Node(node.id, op, values, (product,), node.call, node.ordinal, (operand, node.args[2]))
        factors = tuple(dict.fromkeys(v for v in part.inputs if v in signals))
        _append(flow, classify(part, frozenset(factors)), factors, (product,), part)
        products.append(product)
    _append(flow, Role.ADD, tuple(products), node.outputs, node)


def _extra(flow: Flow, node: Node) -> int:
    """A value of its own for what `node` computes on its way to its output."""
    value = len(flow.trace.values) + len(flow.extra_shapes)
    flow.extra_shapes[value] = flow.shape(node.outputs[0])
    return value


def _add_group(flow: Flow, group: Group, node: Node) -> None:
    nodes = [flow.trace.nodes[i] for i in sorted(group.nodes)]
    made = {v for n in nodes for v in n.outputs}
    read = dict.fromkeys(v for n in nodes for v in n.inputs if v not in made)
    signals = sorted((v for v in read if flow.levels.signal(v)), key=lambda v: v != group.main)
    statics = tuple(v for v in read if not flow.levels.signal(v))
    _append(flow, group.role, tuple(signals), tuple(sorted(made)), node, statics, group)


def _append(
    flow: Flow,
    role: Role,
    inputs: tuple[int, ...],
    outputs: tuple[int, ...],
    node: Node,
    statics: tuple[int, ...] | None = None,
    group: Group | None = None,
) -> None:
    if statics is None:
        statics = tuple(dict.fromkeys(v for v in node.inputs if not flow.levels.signal(v)))
    parameters = tuple(dict.fromkeys(p for v in statics for p in sorted(flow.levels.parameters(v))))
    parameters = tuple(dict.fromkeys((*parameters, *_picked(flow, role, inputs, node))))
    if role is Role.MATMUL:  # weights may be kept as buffers, as quantised ones are
        held = [v for v in statics if len(flow.shape(v)) > 1]
        if not any(flow.levels.parameters(v) for v in held):
            found = (b for v in held for b in sorted(flow.levels.buffers(v)))
            parameters = tuple(dict.fromkeys((*parameters, *found)))
    call = group.call if group else node.call
    step = Step(len(flow.steps), role, inputs, outputs, statics, parameters, node, call, group)
    flow.steps.append(step)
    for value in inputs:
        flow.consumers[value].append(step.id)
    for value in outputs:
        flow.producer[value] = step.id


def _picked(flow: Flow, role: Role, inputs: tuple[int, ...], node: Node) -> Iterator[str]:
    """The parameters that the factors of a product, or the rows beside the signal of a shift or scale, came from."""
    aside = (v for v in node.inputs if v not in inputs) if role in (Role.SHIFT, Role.SCALE) else ()
    for value in inputs if role is Role.MATMUL else aside:
        step = _pick(flow, value)
        yield from step.parameters if step is not None else ()


def _pick(flow: Flow, value: int) -> Step | None:
    """The step that picked a value out of parameters by an index (the weights of the experts that a router chose)."""
    while (step := flow.made_by(value)) is not None and step.role in (Role.MOVE, Role.SOURCE):
        if base(step.node.op) in _PICKS and _ref(step.node.args[0]) not in step.inputs:
            return step
        if len(step.inputs) != 1:
            return None
        value = step.inputs[0]
    return None


def _ref(argument: object) -> int:
    return argument.value if isinstance(argument, Ref) else -1
