"""What stands between the projection of queries or keys and their product."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from normprobe.anatomy.flow.ops import PRODUCTS, Role, base
from normprobe.anatomy.flow.steps import Flow, Step
from normprobe.anatomy.flow.walk import backward
from normprobe.records import AttentionSite
from normprobe.rewrites.base import Survey

_ENDS = frozenset({Role.MATMUL, Role.SOFTMAX, Role.ATTENTION})
_LINEAR = frozenset({Role.MOVE, Role.SCALE, Role.POOL, Role.NORM})


def why_bent(survey: Survey, site: AttentionSite) -> str | None:
    """Why a norm behind the projections of an attention does not bound its logits; None where it does.

    Reshapes, factors and rotary embeddings, which are sums of the features times what depends on the place, may stand
    between. A clamp, an activation and a sum with something else may not: they see other sizes behind a norm, and make
    queries and keys of another length than its gain says.
    """
    flow, query, key = survey.flow, site.columns.get("q"), site.columns.get("k")
    if query is None or key is None:
        return None
    pairs = ((query.parameter, key.parameter), (key.parameter, query.parameter))
    for one, other in _products(flow, site.path):
        for names in pairs:
            ways = [_Way.of(flow, value, name) for value, name in zip((one, other), names, strict=True)]
            step = next((way.bends for way in ways if way.bends is not None), None)
            if step is not None and all(way.arrives for way in ways):
                what, where = step.node.op.removeprefix("aten."), flow.path(step) or "."
                return f"{what} in {where} stands between a projection and q·k, where reshapes and factors alone may"
    return None


def _products(flow: Flow, path: str) -> Iterator[tuple[int, int]]:
    """The two operands of every product of signals inside a module, of a fused attention its queries and keys."""
    for step in flow.steps:
        product = step.role is Role.ATTENTION or (step.role is Role.MATMUL and not step.parameters)
        if product and len(step.inputs) > 1 and (path == "." or f"{flow.path(step)}.".startswith(f"{path}.")):
            yield step.inputs[0], step.inputs[1]


@dataclass(frozen=True)
class _Way:
    """From an operand back to a product with a weight: whether it arrives, and the first step behind that weight that
    is more than linear."""

    arrives: bool
    bends: Step | None

    @classmethod
    def of(cls, flow: Flow, value: int, weight: str) -> _Way:
        ends = {step.id for step in flow.steps if step.role is Role.MATMUL and weight in step.parameters}
        behind = {output for end in ends for output in flow.steps[end].outputs}
        made = backward(flow, value, lambda step, _: step is None or step.role in _ENDS)
        way = sorted({step.id: step for _, step in made if step is not None}.items())
        arrives, bends = value in behind, None
        for _, step in way:
            if not behind.isdisjoint(step.inputs):
                arrives = True
                behind.update(step.outputs)
                if bends is None and not _linear(flow, step, behind, weight.rpartition(".")[0]):
                    bends = step
        return cls(arrives, bends)


def _linear(flow: Flow, step: Step, behind: set[int], module: str) -> bool:
    """Whether a step is linear in what is `behind` the product; a bias of the projection's own module is part of it."""
    others = [value for value in step.inputs if value not in behind and flow.floating(value)]
    if step.role is Role.GATE:
        one = len(others) == len(step.inputs) - 1
        return base(step.node.op) in PRODUCTS and one and not any(_learned(flow, value) for value in others)
    if step.role is Role.SHIFT:
        return bool(step.parameters) and all(name.rpartition(".")[0] == module for name in step.parameters)
    return step.role in _LINEAR or (step.role is Role.ADD and not others)


def _learned(flow: Flow, value: int) -> bool:
    """Whether parameters have a part in a value."""
    made = backward(flow, value, lambda step, _: step is None)
    return any(step is not None and bool(step.parameters) for _, step in made)
