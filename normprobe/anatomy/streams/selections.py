"""Choices between states of one trunk: tokens that skip a block, rows that are written back into the stream."""

from __future__ import annotations

from normprobe.anatomy.flow.steps import Flow, Step
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


def _ahead(flow: Flow, value: int, other: int, trunks: Trunks) -> int | None:
    """How many more writes lie between the nearest state that two values share and `value` than between it and `other`;
    None where they share none."""
    passed = {link.value: len(over) for link, over in reversed(list(states(flow, other, trunks)))}
    return next((len(over) - passed[k.value] for k, over in states(flow, value, trunks) if k.value in passed), None)
