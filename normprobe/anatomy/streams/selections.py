"""Several states of one trunk in one step: tokens that skip a block, rows that are written back into the stream, an
earlier state beside the current one."""

from __future__ import annotations

import math
from collections.abc import Iterator

from normprobe.anatomy.flow.ops import LIGHT, Role, base
from normprobe.anatomy.flow.pieces import taken
from normprobe.anatomy.flow.steps import Flow, Step
from normprobe.anatomy.flow.walk import light_chain
from normprobe.anatomy.streams.moves import carried, chooses
from normprobe.anatomy.streams.trunks import states
from normprobe.anatomy.streams.writes import Trunks


def latest(flow: Flow, step: Step, trunks: Trunks) -> int | None:
    """Of the tensors that a move chooses elements from, the one that holds the latest state of the trunk on which they
    all lie; None where they do not, or none is later than the first."""
    first, *others = carried(flow, step)
    if not others or not chooses(step):
        return None
    value = first
    for other in others:
        ahead = _ahead(flow, other, value, trunks)
        if ahead is None:
            return None
        value = other if ahead > 0 else value
    return value if value != first or _ahead(flow, first, others[0], trunks) else None


def put_together(flow: Flow, step: Step, trunks: Trunks) -> int | None:
    """Of the pieces of one state of a trunk that a concatenation puts together again, some of them written to, the one
    with the most writes behind it; None where they are no pieces of one state, or none is written to."""
    size = math.prod(flow.shape(step.outputs[0]))
    if base(step.node.op) != "aten.cat" or not all(flow.floating(v) for v in step.inputs):
        return None
    passed = {v: {link.value: len(over) for link, over in states(flow, v, trunks)} for v in step.inputs}
    longest = max(step.inputs, key=lambda v: len(passed[v]))
    for whole in (v for v in passed[longest] if math.prod(flow.shape(v)) == size):
        own = [v for v in step.inputs if whole in passed[v]]
        given = [v for v in step.inputs if v not in own]
        if all(_added_to(flow, v, whole, trunks) for v in given):
            latest = max(own, key=lambda v: passed[v][whole])
            return latest if given or passed[latest][whole] else None
    return None


def taken_out(flow: Flow, step: Step, trunks: Trunks) -> int | None:
    """The tensor that a slice takes out of a concatenation as it went in, where the trunk does not go through that as a
    whole (the one path of two that are read side by side)."""
    maker = flow.made_by(step.inputs[0]) if len(step.inputs) == 1 else None
    if maker is None or maker.role is not Role.MOVE or trunks.kept(flow, maker) is not None:
        return None
    return taken(flow.trace, step.node).get(step.outputs[0])


def _added_to(flow: Flow, value: int, whole: int, trunks: Trunks) -> bool:
    """Whether `value` is a sum of a piece of `whole` and something from elsewhere (another stream's result)."""
    *_, (link, _) = states(flow, value, trunks)
    step = flow.made_by(link.value)
    if step is None or step.role is not Role.ADD:
        return False
    return sum(any(k.value == whole for k, _ in states(flow, v, trunks)) for v in step.inputs) == 1


def _ahead(flow: Flow, value: int, other: int, trunks: Trunks) -> int | None:
    """How many more writes lie between the nearest state that two values share and `value` than between it and `other`;
    None where they share none. Both ways are walked back in time together, so that a short one ends the walk."""
    ways = states(flow, value, trunks), states(flow, other, trunks)
    passed: tuple[dict[int, int], dict[int, int]] = {}, {}
    heads = [next(way, None) for way in ways]
    reached = [len(flow.steps), len(flow.steps)]  # the step that made the earliest state of each way so far
    while True:
        made = [-2 if head is None else flow.producer.get(head[0].value, -1) for head in heads]
        side = 0 if made[0] >= made[1] else 1
        head = heads[side]
        if head is None or (heads[1 - side] is None and made[side] < reached[1 - side]):
            return None
        state, reached[side] = head[0].value, made[side]
        passed[side].setdefault(state, len(head[1]))
        if state in passed[1 - side]:
            return passed[0][state] - passed[1][state]
        heads[side] = next(ways[side], None)


def side_by_side(flow: Flow, product: Step, trunks: Trunks) -> int | None:
    """Of the states of one trunk that are put side by side and that `product` draws into one of their size (a long
    skip), the latest; None where it reads something else."""
    value = product.inputs[0]
    while (step := flow.made_by(value)) is not None and len(step.inputs) == 1:
        if step.role is not Role.NORM and step.role not in LIGHT:
            return None
        value = step.inputs[0]
    size = math.prod(flow.shape(product.outputs[0]))
    if step is None or base(step.node.op) != "aten.cat" or any(math.prod(flow.shape(v)) != size for v in step.inputs):
        return None
    for value in step.inputs:
        passed = set(_before(flow, value, trunks))
        others = [v for v in step.inputs if v != value]
        if others and all(any(link.value in passed for link in light_chain(flow, v)) for v in others):
            return value
    return None


def _before(flow: Flow, value: int | None, trunks: Trunks) -> Iterator[int]:
    """The states of the trunk behind at least one write before `value`."""
    written = False
    while value is not None:
        last = value
        for link, over in states(flow, value, trunks):
            last, written = link.value, written or bool(over)
            if written:
                yield last
        step = flow.made_by(last)
        value = None if step is None else trunks.drawn.get(step.id)
