"""Which of its inputs a move goes on from, where it puts several together."""

from __future__ import annotations

import math

from normprobe.anatomy.flow.ops import ALIAS, Role, base
from normprobe.anatomy.flow.steps import Flow, Step
from normprobe.anatomy.flow.walk import argument_value

_MOST = 0.75  # share of a concatenation that makes one part the trunk
_INTO = frozenset(
    f"aten.{n}"
    for n in (
        "index_put",
        "index_put_",
        "slice_scatter",
        "select_scatter",
        "masked_scatter",
        "masked_scatter_",
        "scatter",
        "scatter_",
        "index_copy",
        "index_copy_",
    )
)


def carried(flow: Flow, step: Step) -> tuple[int, ...]:
    """The inputs whose elements a move hands on; masks and indices only say which."""
    return tuple(v for v in step.inputs if flow.floating(v)) or step.inputs


def chooses(step: Step) -> bool:
    """Whether a move takes every element from one of several tensors in its own place, so that each of them may hold
    a state of the trunk."""
    return step.node.op == ALIAS or base(step.node.op) == "aten.where" or base(step.node.op) in _INTO


def kept(flow: Flow, step: Step) -> int | None:
    """The input that a step with one signal keeps; of several the one that others are written into a part of, or put
    beside as a few more tokens."""
    inputs = carried(flow, step)
    if len(inputs) == 1:
        return inputs[0]
    name = base(step.node.op)
    if step.node.op == ALIAS or (name in _INTO and argument_value(step.node.args[0]) == inputs[0]):
        return inputs[0]
    largest = max(inputs, key=lambda v: math.prod(flow.shape(v)), default=-1)
    if name == "aten.cat" and math.prod(flow.shape(largest)) >= _MOST * math.prod(flow.shape(step.outputs[0])):
        return largest
    return _rejoined(flow, step) if step.role is Role.MOVE and inputs else None


def _rejoined(flow: Flow, step: Step) -> int | None:
    """The value whose pieces `step` puts together again (the tokens of two streams, say); None where they come from
    several, or pieces are left out."""
    wholes: set[int] = set()
    for value in carried(flow, step):
        while (maker := flow.made_by(value)) is not None and maker.role is Role.MOVE and len(maker.inputs) == 1:
            value = maker.inputs[0]
        wholes.add(value)
    whole = wholes.pop()
    alike = math.prod(flow.shape(whole)) == math.prod(flow.shape(step.outputs[0]))
    return whole if not wholes and alike else None
