"""Learned tokens: arrays of parameters that take part in attention as tokens do (a decoder's queries, latents).

They depend on no input and so would count as weights until the signal first reaches them. They are told by where they
meet it: in attention whose only product takes one operand from the signal and the other, by way of projections, from
parameters alone, where they say at which places a map is sampled, or where they are put beside the signal's tokens and
are then written to themselves (a class token that alone collects what it reads).
"""

from __future__ import annotations

from collections.abc import Iterator

from normprobe.anatomy.flow.levels import Level, Levels
from normprobe.anatomy.flow.ops import ADDS, LIGHT, SAMPLERS, SOFTMAXES, Role, base, classify, multiplies
from normprobe.anatomy.flow.walk import argument_value
from normprobe.capture.trace import Node, Trace


def with_tokens(trace: Trace) -> Levels:
    """The levels of a trace in which learned tokens count as signals."""
    levels = Levels(trace)
    tokens = _begins(trace, levels)
    return Levels(trace, tokens) if tokens else levels


def _begins(trace: Trace, levels: Levels) -> frozenset[int]:
    """The values with which learned tokens begin: parameters, their views, and the zeros that they are added to."""
    reading = _Reading(trace, levels)
    found: set[int] = set()
    for operands in _meetings(trace, levels):
        static = [v for v in operands if levels.of[v] is Level.STATIC and levels.parameters(v) and not reading.raw(v)]
        if len(static) < len(operands) and all(len(trace.values[v].shape) > 2 for v in static):
            found.update(v for start in static for v in reading.roots(start))
    for value in _written(trace, levels):
        found.update(reading.roots(value))
    return frozenset(found)


def _written(trace: Trace, levels: Levels) -> set[int]:
    """Arrays of parameters that are joined with signals and to which, whole, a signal is added."""
    joined: set[int] = set()
    found: set[int] = set()
    for node in trace.nodes:
        static = [v for v in node.inputs if levels.of[v] is Level.STATIC and levels.parameters(v)]
        if not static or len(static) == len(node.inputs):
            continue
        if base(node.op) == "aten.cat":
            joined.update(v for v in static if len(trace.values[v].shape) > 2)
        elif base(node.op) in ADDS:
            shape = trace.values[node.outputs[0]].shape
            found.update(v for v in joined.intersection(static) if trace.values[v].shape == shape)
    return found


def _meetings(trace: Trace, levels: Levels) -> Iterator[tuple[int, ...]]:
    """Query, key and values of attention of which only some may be signals; map and places of every sampling."""
    for call in trace.calls:
        operands = [argument_value(call.arguments.get(n)) for n in ("query", "key", "value")] if call.composite else []
        if operands and all(v is not None for v in operands):
            yield tuple(v for v in operands if v is not None)
    for node in trace.nodes:
        if base(node.op) in SAMPLERS or _weighs(trace, levels, node):
            yield _operands(node)
        if base(node.op) in SOFTMAXES and levels.signal(node.inputs[0]):
            products = list(_products(trace, levels, node.inputs[0]))
            if not any(all(levels.signal(v) for v in operands) for operands in products):
                yield from products


def _weighs(trace: Trace, levels: Levels, node: Node) -> bool:
    """Whether a product takes one factor from a softmax over signals, over views and masks."""
    if not multiplies(node):
        return False
    maker = trace.producer(_operands(node)[0])
    while maker.inputs and _role(maker) in LIGHT:
        maker = trace.producer(maker.inputs[0])
    return base(maker.op) in SOFTMAXES and levels.signal(maker.outputs[0])


def _products(trace: Trace, levels: Levels, value: int) -> Iterator[tuple[int, ...]]:
    """The operands of the products that logits are the sum of."""
    todo, seen = [value], {value}
    while todo:
        node = trace.producer(todo.pop())
        if multiplies(node):
            yield _operands(node)
            continue
        fresh = [v for v in node.inputs if levels.signal(v) and v not in seen]
        seen.update(fresh)
        todo += fresh


def _role(node: Node) -> Role | None:
    return classify(node, frozenset(node.inputs)) if node.function is not None and node.inputs else None


def _operands(node: Node) -> tuple[int, ...]:
    """The factors of a product, the activation first; what it is added to is left out."""
    values = [v for v in map(argument_value, node.args) if v is not None]
    adds = base(node.op) in ("aten.addmm", "aten.baddbmm", "aten.addbmm", "aten.addmv")
    return tuple(values[1:3] if adds else values[:2])


class _Reading:
    """Static values followed back to where they begin."""

    def __init__(self, trace: Trace, levels: Levels) -> None:
        self._trace, self._levels = trace, levels
        self._raw: dict[int, bool] = {}

    def raw(self, value: int) -> bool:
        """Whether a static value is a parameter, a buffer or a constant, or rows or a view of one."""
        todo = [value]
        while todo:
            current = todo[-1]
            if current not in self._raw:
                node = self._trace.producer(current)
                waiting = [v for v in node.inputs if v not in self._raw] if _moves(node) else []
                if waiting:
                    todo += waiting
                    continue
                self._raw[current] = not node.inputs or (_moves(node) and all(self._raw[v] for v in node.inputs))
            todo.pop()
        return self._raw[value]

    def roots(self, value: int) -> set[int]:
        """The raw values that a static value was computed from as an activation; weights, gains and biases are not
        followed."""
        found: set[int] = set()
        todo, seen = [value], {value}
        while todo:
            current = todo.pop()
            if self.raw(current):
                found.add(self._first(current))
                continue
            fresh = [v for v in self._activations(self._trace.producer(current)) if v not in seen]
            seen.update(fresh)
            todo += fresh
        return found

    def _first(self, value: int) -> int:
        """The first of the views that a raw value is the last of; what made it reads a parameter, or nothing."""
        while len((node := self._trace.producer(value)).inputs) == 1 and _role(node) is Role.MOVE:
            if self._trace.producer(node.inputs[0]).op in ("parameter", "buffer"):
                break
            value = node.inputs[0]
        return value

    def _activations(self, node: Node) -> tuple[int, ...]:
        """Of the inputs those that were computed; of raw ones alone a product's first, a norm's first, else all."""
        inputs = _operands(node) if multiplies(node) else node.inputs
        floating = tuple(v for v in inputs if self._trace.values[v].dtype.is_floating_point)
        computed = tuple(v for v in floating if not self.raw(v))
        if computed:
            return computed
        return floating[:1] if _role(node) in (Role.MATMUL, Role.NORM) else floating


def _moves(node: Node) -> bool:
    return base(node.op) == "aten.embedding" or base(node.op).endswith("_like") or _role(node) is Role.MOVE
