"""A branch that is the sum of several: its summands, which may share what reads the stream and what writes to it."""

from __future__ import annotations

from collections.abc import Container

from normprobe.anatomy.flow.ops import LIGHT, Role, base
from normprobe.anatomy.flow.steps import Flow, Step
from normprobe.anatomy.flow.walk import light_chain
from normprobe.anatomy.streams.parts import Part, bends, heavy, make_part, region_to

_ATTENDING = frozenset({Role.SOFTMAX, Role.ATTENTION})


def split(flow: Flow, source: int, part: Part, writes: Container[int]) -> list[Part]:
    """The independent branches whose sum is `part`; `part` itself where a summand has no weights of its own. They may
    share the projection that reads the stream, the one that writes to it, and the norm and the factor on their sum."""
    step, tail = _ending(flow, part)
    if step is None:
        return [part]
    if step.role is Role.MATMUL:
        return _joined(flow, source, part, step) or [part]
    if step.role is not Role.ADD or step.id in writes or len(step.inputs) != 2:
        return [part]
    sides = [make_part(flow, source, v, region_to(flow, source, v, part.region)) for v in step.inputs]
    weights = [heavy(flow, side.region) for side in sides]
    own = [w - (weights[0] & weights[1]) for w in weights]
    if not all(own) or (own != weights and not all(any(flow.steps[i].parameters for i in o) for o in own)):
        return [part]
    found = [p for side in sides for p in split(flow, source, side, writes)]
    whole = [make_part(flow, source, part.end, p.region | tail) for p in found]
    return sorted(whole, key=lambda p: min(heavy(flow, p.region)))


def _ending(flow: Flow, part: Part) -> tuple[Step | None, frozenset[int]]:
    """The step behind which a part has no more than light steps and norms, and all of those; None where it has no
    other."""
    value, tail = part.end, set[int]()
    while (step := flow.made_by(value)) is not None and step.id in part.region:
        tail.add(step.id)
        if len(step.inputs) != 1 or (step.role is not Role.NORM and step.role not in LIGHT):
            return step, frozenset(tail)
        value = step.inputs[0]
    return None, frozenset(tail)


def _joined(flow: Flow, source: int, part: Part, writer: Step) -> list[Part]:
    """Attention and what runs beside it, where their features are joined and `writer` projects both to the stream."""
    *_, last = light_chain(flow, writer.inputs[0])
    join = flow.made_by(last.value)
    if len(writer.inputs) != 1 or join is None or base(join.node.op) != "aten.cat" or len(join.inputs) != 2:
        return []
    if int(join.node.args[1]) % len(flow.shape(last.value)) != len(flow.shape(last.value)) - 1:
        return []
    sides = [region_to(flow, source, v, part.region) for v in join.inputs]
    attends = [any(flow.steps[i].role in _ATTENDING for i in side) for side in sides]
    if all(attends) or not any(attends) or not all(bends(flow, side) for side in sides):
        return []
    tail = part.region - sides[0] - sides[1]
    return [make_part(flow, source, part.end, side | tail) for side in (sides if attends[0] else sides[::-1])]
