"""Sums of a trunk and a branch that are not read as writes, so that the report can name them."""

from __future__ import annotations

from collections.abc import Iterator

from normprobe.anatomy.flow.ops import WEIGHTY, Role, base
from normprobe.anatomy.flow.steps import Flow, Step
from normprobe.anatomy.flow.walk import backward, light_chain
from normprobe.anatomy.streams.writes import Trunks
from normprobe.records import Skipped

_NEGATIVE = "the trunk enters it with a negative factor"
_STACKED = "it weighs trunk and branch by one product over their stack"


def unread_sums(flow: Flow, trunks: Trunks) -> Iterator[Skipped]:
    """One line for each way in which a trunk goes on that no write was read from, outside of all branches."""
    inside = frozenset[int]().union(*(write.whole.region for write in trunks.writes.values()))
    negative = [flow.steps[i] for i in sorted(trunks.refused - trunks.writes.keys() - inside)]
    stacked = [step for step in flow.steps if step.id not in inside and _weighs(flow, step)]
    for steps, why in ((negative, _NEGATIVE), (stacked, _STACKED)):
        if steps:
            others = f" and {len(steps) - 1} more" if len(steps) > 1 else ""
            yield Skipped(what=f"the sum {base(steps[0].node.op)} at {flow.path(steps[0])}{others}", why=why)


def _weighs(flow: Flow, step: Step) -> bool:
    """Whether a product or sum draws a stack of two tensors together, of which one is a trunk of the other."""
    if step.role not in (Role.MATMUL, Role.POOL) or len(step.inputs) != 1:
        return False
    *_, link = light_chain(flow, step.inputs[0])
    stack = flow.made_by(link.value)
    if stack is None or base(stack.node.op) != "aten.stack" or len(stack.inputs) != 2:
        return False
    return any(_branches(flow, *pair) for pair in (stack.inputs, stack.inputs[::-1]))


def _branches(flow: Flow, trunk: int, end: int) -> bool:
    """Whether `end` was computed by weighty steps from a state that `trunk` comes from by light ones."""
    states = {link.value for link in light_chain(flow, trunk)}
    oldest = min(flow.producer.get(v, -1) for v in states)
    walked = list(backward(flow, end, lambda _, v: flow.producer.get(v, -1) < oldest))
    weighty = any(step is not None and step.role in WEIGHTY and step.id > oldest for _, step in walked)
    return weighty and end not in states and any(v in states for v, _ in walked)
