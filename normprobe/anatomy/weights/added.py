"""Parameters that a forward adds to the signal and does nothing else with: biases of any shape."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from normprobe.anatomy.flow.ops import base
from normprobe.anatomy.weights.axes import MOVES, origin
from normprobe.capture.trace import Node, Ref, Trace

_SUMS = frozenset({"aten.add", "aten.add_", "aten.sub", "aten.sub_", "aten.rsub"})
_BIASES = {"aten.linear": 2, "aten.convolution": 2, "aten._convolution": 2} | dict.fromkeys(
    ("aten.addmm", "aten.addmv", "aten.baddbmm", "aten.addbmm"), 0
)  # place of the argument that is added to a product


def added_parameters(trace: Trace, *, picked: bool = False) -> Mapping[str, frozenset[int]]:
    """The parameters whose every use is a sum with what depends on the inputs, perhaps after a move of their elements.

    A sum with another parameter makes a weight or a table of two, which is no bias.

    Args:
        trace: of one forward.
        picked: whether rows that an index picks first count too: the biases of experts, but tables of positions as
            well.

    Returns:
        By name, the axes along which a parameter holds several of them: those that each use selects one place of.
    """
    signal = _from_inputs(trace)
    names = {value: node.name for node in trace.nodes if node.op == "parameter" for value in node.outputs}
    found: dict[str, frozenset[int]] = {}
    others: set[str] = set()
    for node in trace.nodes:
        for place, value in _operands(node):
            name = names.get(value)
            if name is None:
                continue
            if base(node.op) in MOVES and place == 0 and (picked or base(node.op) != "aten.index"):
                names.update(dict.fromkeys(node.outputs, name))
                continue
            told = origin(trace, Ref(value)) if _adds(trace, node, place, signal) else None
            if told is None:
                others.add(name)
                continue
            left = frozenset(range(len(told[1]))) - frozenset().union(*told[2])
            found[name] = found.get(name, left) & left
    return {name: axes for name, axes in found.items() if name not in others}


def _from_inputs(trace: Trace) -> set[int]:
    """The values that depend on the inputs of the forward."""
    signal: set[int] = set()
    for node in trace.nodes:
        if node.op == "input" or not signal.isdisjoint(node.inputs):
            signal.update(node.outputs)
    return signal


def _adds(trace: Trace, node: Node, place: int | None, signal: set[int]) -> bool:
    """Whether a node adds its argument at `place` to the signal, or to each row of a product."""
    name = base(node.op)
    reached = any(v in signal for at, v in _operands(node) if at != place)
    if name in _BIASES:
        rows = place is not None and len(trace.values[node.args[place].value].shape) == 1
        return place == _BIASES[name] and (reached or rows)
    return name in _SUMS and reached


def _operands(node: Node) -> Iterator[tuple[int | None, int]]:
    """The values that a node takes, each with its place among the arguments; None for those in containers or given by
    name."""
    for place, arg in enumerate(node.args):
        yield from ((place if isinstance(arg, Ref) else None, value) for value in _values(arg))
    yield from ((None, value) for arg in node.kwargs.values() for value in _values(arg))


def _values(arg: Any) -> Iterator[int]:
    if isinstance(arg, Ref):
        yield arg.value
    elif isinstance(arg, Sequence) and not isinstance(arg, str):
        for one in arg:
            yield from _values(one)
