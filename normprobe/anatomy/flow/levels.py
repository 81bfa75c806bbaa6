"""How far each recorded value depends on the model's input: not at all, only on its structure, or as a signal."""

from __future__ import annotations

from enum import IntEnum

from normprobe.anatomy.flow.ops import base
from normprobe.capture.trace import Trace


class Level(IntEnum):
    """STATIC: parameters, buffers, constants and what is computed from them alone. STRUCTURAL: depends on integer or
    boolean inputs without passing a parameter (positions, masks). SIGNAL: everything that carries the input."""

    STATIC = 0
    STRUCTURAL = 1
    SIGNAL = 2


class Levels:
    """Levels of all values of a trace, and the parameters and buffers that the static ones come from.

    `tokens` are static values that count as signals.
    """

    def __init__(self, trace: Trace, tokens: frozenset[int] = frozenset()) -> None:
        self.trace = trace
        self.of: list[Level] = [Level.STATIC] * len(trace.values)
        self._parameters: list[frozenset[str]] = [frozenset()] * len(trace.values)
        self._buffers: list[frozenset[str]] = [frozenset()] * len(trace.values)
        self._raw = [False] * len(trace.values)
        self._learned = [False] * len(trace.values)
        for node in trace.nodes:
            level, parameters, buffers = self._node(node.op, node.name, node.inputs, node.outputs)
            begins = not tokens.isdisjoint(node.outputs)
            if begins:
                level, parameters, buffers = Level.SIGNAL, frozenset(), frozenset()
            signals = [v for v in node.inputs if self.of[v] is Level.SIGNAL]
            learned = begins or (bool(signals) and all([self._learned[v] for v in signals]))
            raw = level is Level.SIGNAL and not begins and all([self._raw[v] for v in signals])
            raw = raw and not any([self._parameters[v] for v in node.inputs])
            for value in node.outputs:
                self._raw[value] = raw
                self._learned[value] = learned
                self.of[value] = level
                self._parameters[value] = parameters
                self._buffers[value] = buffers

    def signal(self, value: int) -> bool:
        """Whether `value` carries the model's input, as all do that a step only computes on its way."""
        return value >= len(self.of) or self.of[value] is Level.SIGNAL

    def raw(self, value: int) -> bool:
        """Whether a signal comes from floating inputs alone, with no parameter on the way (a mask of floats, say)."""
        return self._raw[value]

    def learned(self, value: int) -> bool:
        """Whether a signal comes from learned tokens alone, so that it does not depend on the input."""
        return self._learned[value]

    def parameters(self, value: int) -> frozenset[str]:
        """Parameters that a static or structural value was computed from; empty for a signal."""
        return self._parameters[value]

    def buffers(self, value: int) -> frozenset[str]:
        """Buffers that a static or structural value was computed from; empty for a signal."""
        return self._buffers[value]

    def _node(
        self, op: str, name: str, inputs: tuple[int, ...], outputs: tuple[int, ...]
    ) -> tuple[Level, frozenset[str], frozenset[str]]:
        none: frozenset[str] = frozenset()
        if op == "parameter":
            return Level.STATIC, frozenset({name}), none
        if op == "buffer":
            return Level.STATIC, none, frozenset({name})
        if op == "input":
            floating = self.trace.values[outputs[0]].dtype.is_floating_point
            return (Level.SIGNAL if floating else Level.STRUCTURAL), none, none
        level = max([self.of[v] for v in inputs], default=Level.STATIC)
        parameters = none.union(*[names for v in inputs if (names := self._parameters[v])])
        if level is Level.STRUCTURAL and parameters:
            level = Level.SIGNAL
        if base(op).endswith("_like") or op.startswith("aten.new_"):
            return Level.STATIC, none, none  # reads shapes, not contents
        if level is Level.SIGNAL:
            return level, none, none
        return level, parameters, none.union(*[names for v in inputs if (names := self._buffers[v])])
