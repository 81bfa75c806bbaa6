"""Shortcuts that a projection or a pooling takes around a branch."""

from __future__ import annotations

from collections.abc import Iterator

from normprobe.anatomy.flow.ops import LIGHT, Role
from normprobe.anatomy.flow.steps import Flow, Step
from normprobe.anatomy.flow.walk import Link, pools
from normprobe.anatomy.streams.writes import State


def shortcut(flow: Flow, value: int) -> Iterator[Step]:
    """The steps behind a shortcut over views, norms, poolings and projections."""
    while (step := flow.made_by(value)) is not None:
        passed = step.role in LIGHT or pools(step) or (step.role is Role.MATMUL and step.parameters)
        if step.role is not Role.NORM and not (passed and len(step.inputs) == 1):
            return
        yield step
        value = step.inputs[0]


def projected(flow: Flow, value: int) -> Iterator[State]:
    """The chain behind a shortcut's projections, its poolings and the norms around them; empty without any."""
    changed = False
    for step in shortcut(flow, value):
        changed = changed or step.role is Role.MATMUL or pools(step)
        if changed:
            yield Link(step.inputs[0], None), ()


def projections(flow: Flow, value: int) -> frozenset[int]:
    """The ids of the projections on a shortcut."""
    return frozenset(s.id for s in shortcut(flow, value) if s.role is Role.MATMUL)
