"""Whether a learned factor is held under a largest value."""

from __future__ import annotations

from typing import NamedTuple

from normprobe.anatomy.flow.ops import base
from normprobe.anatomy.flow.steps import Flow, Step
from normprobe.capture.trace import Node

_BOUNDING = frozenset(
    f"aten.{name}"
    for name in (
        "clamp_max",
        "minimum",
        "hardtanh",
        "sigmoid",
        "hardsigmoid",
        "log_sigmoid_forward",
        "tanh",
        "softmax",
        "_softmax",
        "cos",
        "sin",
    )
)


class Learned(NamedTuple):
    """The parameters that factors are computed from, and whether all these factors are held under a largest value."""

    parameters: tuple[str, ...] = ()
    bounded: bool = True

    def times(self, flow: Flow, step: Step) -> Learned:
        """With the factor of one more step."""
        return self.beside(Learned(step.parameters, all(bounded(flow, value) for value in step.statics)))

    def beside(self, *others: Learned) -> Learned:
        """With the factors of others."""
        every = (self, *others)
        return Learned(tuple(name for one in every for name in one.parameters), all(one.bounded for one in every))


NONE = Learned()


def bounded(flow: Flow, value: int) -> bool:
    """Whether every way from a parameter to `value` passes an operation that has a largest result."""
    todo, seen = [value], {value}
    while todo:
        node = flow.trace.producer(todo.pop())
        if node.op == "parameter":
            return False
        if _bounds(node):
            continue
        fresh = [v for v in node.inputs if v not in seen]
        seen.update(fresh)
        todo += fresh
    return True


def _bounds(node: Node) -> bool:
    name = base(node.op).rstrip("_")
    if name != "aten.clamp":
        return name in _BOUNDING
    most = node.args[2] if len(node.args) > 2 else node.kwargs.get("max")
    return most is not None
