"""Heads beside the head: products with weights that read the raw end of a stream and make outputs of the model."""

from __future__ import annotations

from normprobe.anatomy.flow.ops import LIGHT, Role
from normprobe.anatomy.flow.steps import Flow, Step
from normprobe.anatomy.flow.walk import first_readers

_OPEN = LIGHT | {Role.POOL}
_HEADS = _OPEN | {Role.MATMUL, Role.ACT}


def raw_heads(flow: Flow, value: int, ancestors: frozenset[int]) -> tuple[str, ...]:
    """Where products with weights read the stream that ends in `value`, and all that comes of them are outputs, with
    activations and further products at most between; what lies on the way to the head, its `ancestors`, apart."""
    away = [s for s in first_readers(flow, value, None, _OPEN) if s.id not in ancestors]
    heads = [s for s in away if s.role is Role.MATMUL and s.parameters and _ends_in_output(flow, s)]
    return tuple(dict.fromkeys(flow.path(step) for step in heads))


def _ends_in_output(flow: Flow, product: Step) -> bool:
    todo, seen, found = [product], {product.id}, False
    while todo:
        step = todo.pop()
        if step.role not in _HEADS or (step.role is Role.MATMUL and not step.parameters):
            return False
        found = found or not flow.outputs.keys().isdisjoint(step.outputs)
        fresh = {s.id: s for v in step.outputs for s in flow.readers(v) if s.id not in seen}
        seen.update(fresh)
        todo += fresh.values()
    return found
