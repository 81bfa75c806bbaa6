"""Module runs that could be norms: no heavy operation inside, one float output shaped like one of the inputs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from itertools import accumulate
from typing import Any

import torch

from normprobe.anatomy.flow.levels import Levels
from normprobe.anatomy.flow.ops import WEIGHTY, Role, classify, foreign, slides, sums_squares
from normprobe.capture.calls import CallSpec
from normprobe.capture.leaves import replaced
from normprobe.capture.trace import SOURCES, Call, Node, Ref, Trace
from normprobe.norms.module_subject import Tail

_STATISTICS = frozenset({Role.POOL, Role.REDUCE, Role.NORM})
_POINTWISE = frozenset({Role.ACT, Role.GATE, Role.SCALE, Role.SHIFT, Role.MOVE})


class Candidates:
    """Finds the candidate calls of a trace, innermost first."""

    def __init__(self, trace: Trace, levels: Levels) -> None:
        self.trace, self.levels = trace, levels
        self.roles = [self._role(node) for node in trace.nodes]
        heavy = zip(self.roles, trace.nodes, strict=True)
        opaque = [role is Role.HEAVY and (foreign(n.op) or slides(n)) for role, n in heavy]
        self._heavy = [0, *accumulate(r in WEIGHTY and not o for r, o in zip(self.roles, opaque, strict=True))]
        self._statistic = [0, *accumulate(r in _STATISTICS or o for r, o in zip(self.roles, opaque, strict=True))]

    def calls(self) -> Iterator[Call]:
        """Candidate calls, later and inner ones first."""
        for call in reversed(self.trace.calls):
            if not call.composite and call.spec is not None and self._possible(call):
                yield call

    def static_calls(self) -> Iterator[Call]:
        """Runs that take statistics of static values alone (position embeddings, say), later and inner ones first; one
        whose result a product uses as its weight is a reparametrization."""
        weights = self._weights()
        for call in reversed(self.trace.calls):
            nodes = self.trace.nodes[call.first_node : call.last_node]
            works = [n for n in nodes if n.op not in SOURCES]
            static = not any(self.levels.of[v] for n in works for v in n.outputs)
            if call.composite or call.spec is None or len(call.outputs) != 1 or not works or not static:
                continue
            if call.outputs[0] in weights:
                continue
            roles = {classify(n, frozenset(n.inputs[:1])) for n in works if n.inputs}
            if roles & _STATISTICS and not roles & WEIGHTY:
                yield call

    def _weights(self) -> set[int]:
        """The static values that products with a signal use, and what those are views of."""
        found: set[int] = set()
        for node, role in zip(self.trace.nodes, self.roles, strict=True):
            for value in node.inputs if role is Role.MATMUL else ():
                while not self.levels.signal(value) and value not in found:
                    found.add(value)
                    maker = self.trace.producer(value)
                    if maker.inputs and classify(maker, frozenset(maker.inputs[:1])) is Role.MOVE:
                        value = maker.inputs[0]
        return found

    def nodes(self, call: Call) -> frozenset[int]:
        """The operations on signals inside `call`, those behind a sum that it returns beside its norm apart."""
        beside = [v for i, v in enumerate(call.outputs) if len(call.outputs) > 1 and i != self.normed(call)]
        apart = frozenset[int]().union(*(self._sum(call, v) or frozenset() for v in beside))
        return frozenset(i for i in range(call.first_node, call.last_node) if self.roles[i] is not None) - apart

    def normed(self, call: Call) -> int | None:
        """Which result of `call` could be normed: the only one shaped as an argument (statistics may be returned beside
        it), or the one besides a sum of its arguments."""
        if len(call.outputs) == 1:
            return 0 if self.levels.signal(call.outputs[0]) else None
        alike = self._alike(call)
        made = [i for i in alike if self._sum(call, call.outputs[i]) is None]
        return made[0] if len(made) == 1 and len(alike) <= 2 and self.levels.signal(call.outputs[made[0]]) else None

    def _alike(self, call: Call) -> list[int]:
        """The results that are shaped as a signal among the arguments."""
        shapes = {self.trace.values[v].shape for v in call.inputs if self.levels.signal(v)}
        return [i for i, v in enumerate(call.outputs) if self.trace.values[v].shape in shapes]

    def spec(self, call: Call) -> CallSpec:
        """How to call the module of `call` again for its normed result."""
        assert call.spec is not None
        shapes = [self.trace.values[v].shape for v in call.outputs]
        normed = self.normed(call) or 0
        return replace(call.spec, result=shapes[:normed].count(shapes[normed]))

    def _sum(self, call: Call, value: int) -> frozenset[int] | None:
        """The operations behind a result that is a sum of arguments, views and casts apart; None where it is more."""
        found: set[int] = set()
        todo = [value]
        while todo:
            node = self.trace.producer(todo.pop())
            if node.id < call.first_node or node.id in found or self.roles[node.id] is None:
                continue
            if self.roles[node.id] not in (Role.ADD, Role.SHIFT, Role.MOVE):
                return None
            found.add(node.id)
            todo += node.inputs
        return frozenset(found)

    def before_tail(self, call: Call) -> tuple[Tail, frozenset[int]] | None:
        """The activation that `call` ends in, one operation or written out, and the operations on signals before it;
        None where it ends otherwise."""
        found = self._tail(call)
        if found is None:
            return None
        start, tail = found
        reader = max((n for n in tail if start in n.inputs), key=lambda n: n.id)
        places = [i for i, a in enumerate(reader.args) if isinstance(a, Ref) and a.value == start]
        later = any(n.function is reader.function for n in self.trace.nodes[reader.id + 1 : call.last_node])
        nodes = self.nodes(call) - {n.id for n in tail}
        return (Tail(reader.function, places[0]), nodes) if nodes and places and not later else None

    def _tail(self, call: Call) -> tuple[int, list[Node]] | None:
        """The pointwise operations at the end of `call` that come from one value, the last activation among them, and
        that value."""
        pending, tail = {call.outputs[self.normed(call) or 0]}, list[Node]()
        while len(pending) > 1 or not any(self.roles[n.id] is Role.ACT for n in tail):
            value = max(pending, key=lambda v: self.trace.producer(v).id)
            node = self.trace.producer(value)
            role = self.roles[node.id]
            learned = role is not Role.ACT and any(self.levels.parameters(v) for v in node.inputs)
            if node.id < call.first_node or role not in _POINTWISE or learned:
                return None
            tail.append(node)
            pending = (pending - {value}) | {v for v in node.inputs if self.levels.signal(v)}
        return pending.pop(), tail

    def main_input(self, call: Call) -> int | None:
        """The first signal argument shaped like the output, or with as many elements; the sum where it is returned."""
        normed = self.normed(call) or 0
        sums = [i for i in self._alike(call) if i != normed] if len(call.outputs) > 1 else []
        if sums:
            return call.outputs[sums[0]]
        shape = self.trace.values[call.outputs[normed]].shape
        signals = [v for v in call.inputs if self.levels.signal(v)]
        alike = [v for v in signals if self.trace.values[v].shape == shape]
        sized = [v for v in signals if torch.Size(self.trace.values[v].shape).numel() == torch.Size(shape).numel()]
        return next(iter(alike or sized), None)

    def signature(self, call: Call) -> Any:
        """Equal for two calls only if the same operations ran with the same constants on the same shapes."""
        numbers: dict[int, int] = {v: i for i, v in enumerate(call.inputs)}
        rows = []
        for node in self.trace.nodes[call.first_node : call.last_node]:
            template = replaced((node.args, node.kwargs), partial(_number, numbers), of=Ref)
            shapes = tuple((self.trace.values[v].shape, self.trace.values[v].dtype) for v in node.outputs)
            rows.append((node.op, repr(template), shapes))
            for value in node.outputs:
                numbers[value] = len(numbers)
        return (call.class_name, repr(call.spec), tuple(rows))

    def _role(self, node: Node) -> Role | None:
        if node.op in SOURCES or not any([self.levels.signal(v) for v in node.outputs]):
            return None
        signals = frozenset([v for v in node.inputs if self.levels.signal(v)])
        if not signals:
            return Role.SOURCE
        return Role.POOL if sums_squares(self.trace, node) else classify(node, signals)

    def _possible(self, call: Call) -> bool:
        if self._heavy[call.last_node] - self._heavy[call.first_node]:
            return False
        if not call.outputs or self.normed(call) is None or self.main_input(call) is None:
            return False
        statistics = self._statistic[call.last_node] - self._statistic[call.first_node]
        return bool(statistics) or self._reads_state(call)

    def _reads_state(self, call: Call) -> bool:
        """Whether parameters or buffers enter the call's pointwise operations (bounded stand-ins, frozen norms)."""
        for i in self.nodes(call):
            for value in self.trace.nodes[i].inputs:
                if self.levels.parameters(value) or self.levels.buffers(value):
                    return True
        return False


def _number(numbers: dict[int, int], ref: Ref) -> str:
    return f"%{numbers.setdefault(ref.value, len(numbers))}"
