"""The flow of a trace: its operations as steps, one after another."""

from __future__ import annotations

import math
from collections.abc import Sequence

from normprobe.anatomy.flow.filters import settle_filters
from normprobe.anatomy.flow.levels import Levels
from normprobe.anatomy.flow.ops import ADDS, PIECE, SCALES, Role, base, classify, sums_squares
from normprobe.anatomy.flow.pieces import pieces
from normprobe.anatomy.flow.statics import Statics
from normprobe.anatomy.flow.steps import Flow, Group, append, pick, ref
from normprobe.anatomy.flow.sums import add_sum
from normprobe.capture.trace import Node, Trace

_COPIES = frozenset({"aten.copy_", "aten.copy"})


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
    settle_filters(flow)
    flow.outputs = {value: name for name, value in reversed(trace.outputs)}
    return flow


def _add_node(flow: Flow, node: Node) -> None:
    signals = frozenset(v for v in node.inputs if flow.levels.signal(v))
    signals -= _masks(flow, node, signals) | _overwritten(node, signals) | _rows(flow, node, signals)
    if add_sum(flow, node, signals):
        return
    role = Role.POOL if sums_squares(flow.trace, node) else classify(node, signals) if signals else Role.SOURCE
    inputs = tuple(dict.fromkeys(v for v in node.inputs if v in signals))
    if not all(v in flow.pieces and flow.levels.signal(flow.pieces[v]) for v in node.outputs):
        append(flow, role, inputs, node.outputs, node)
        return
    for output in node.outputs:
        piece = flow.pieces[output]
        append(flow, role, (piece,), (output,), Node(node.id, PIECE, (piece,), (output,), node.call, node.ordinal))


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
    picks = {v: pick(flow, v) for v in signals}
    rows = frozenset(v for v, step in picks.items() if step is not None and step.inputs and step.parameters)
    return rows if rows < signals else frozenset()


def _overwritten(node: Node, signals: frozenset[int]) -> frozenset[int]:
    """What a copy replaces as a whole by another signal."""
    old, new = (ref(node.args[0]), ref(node.args[1])) if base(node.op) in _COPIES else (-1, -1)
    return frozenset({old}) if new in signals and new != old else frozenset()


def _add_group(flow: Flow, group: Group, node: Node) -> None:
    nodes = [flow.trace.nodes[i] for i in sorted(group.nodes)]
    made = {v for n in nodes for v in n.outputs}
    read = dict.fromkeys(v for n in nodes for v in n.inputs if v not in made)
    signals = sorted((v for v in read if flow.levels.signal(v)), key=lambda v: v != group.main)
    statics = tuple(v for v in read if not flow.levels.signal(v))
    append(flow, group.role, tuple(signals), tuple(sorted(made)), node, statics, group)
