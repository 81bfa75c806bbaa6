"""Softmax written out: an exponential divided by its sum, or of logits that the logarithm of that sum is taken off."""

from __future__ import annotations

from normprobe.anatomy.flow.ops import LIGHT, Role, base
from normprobe.anatomy.flow.steps import Flow, Step
from normprobe.anatomy.flow.walk import argument_value, light_chain, reached

_DENOMINATOR = LIGHT | {Role.ADD}


def written_softmax(flow: Flow, step: Step) -> bool:
    """Whether `step` is the exponential of a softmax over the last axis."""
    if base(step.node.op).rstrip("_") != "aten.exp":
        return False
    return _of_logarithm(flow, step.inputs[0]) or any(_divides(flow, value) for value in _sums(flow, step))


def _of_logarithm(flow: Flow, value: int) -> bool:
    """Whether `value` is l − log Σ exp(l)."""
    difference = flow.made_by(value)
    if difference is None or base(difference.node.op) != "aten.sub" or len(difference.inputs) != 2:
        return False
    logits, taken = difference.inputs
    *_, link = light_chain(flow, taken)
    maker = flow.made_by(link.value)
    return maker is not None and base(maker.node.op) == "aten.logsumexp" and maker.inputs[0] == logits


def _sums(flow: Flow, exponential: Step) -> list[int]:
    """The sums over the last axis of what an exponential gives."""
    values = reached(flow, exponential.outputs[0], LIGHT)
    sums = [s for v in values for s in flow.readers(v) if base(s.node.op) == "aten.sum" and len(s.node.args) > 1]
    return [
        s.outputs[0]
        for s in sums
        if [axis % len(flow.shape(s.inputs[0])) for axis in s.node.args[1]] == [_last(flow, s)]
    ]


def _last(flow: Flow, step: Step) -> int:
    return len(flow.shape(step.inputs[0])) - 1


def _divides(flow: Flow, value: int) -> bool:
    """Whether something is divided by a sum, a constant or the weight of a sink added to it or not."""
    values = reached(flow, value, _DENOMINATOR)
    readers = [s for v in values for s in flow.readers(v)]
    return any(base(s.node.op).rstrip("_") == "aten.div" and argument_value(s.node.args[1]) in values for s in readers)
