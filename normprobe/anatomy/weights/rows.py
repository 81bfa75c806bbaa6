"""Which products read what another one made, with nothing but activations between them."""

from __future__ import annotations

from collections.abc import Iterator

from normprobe.anatomy.flow.ops import MAXIMA, Role, base
from normprobe.anatomy.flow.steps import Flow, Step
from normprobe.anatomy.weights.followers import activated

_PASSED = frozenset({Role.MOVE, Role.SHIFT, Role.POOL})


def next_products(flow: Flow, product: Step) -> Iterator[Step]:
    """The products that read the output of `product` past biases, views, casts, poolings and known activations; a norm,
    a factor and anything that takes a second signal end the way."""
    todo, seen = list(product.outputs), set(product.outputs)
    while todo:
        value = todo.pop()
        readers = flow.readers(value)
        yield from (s for s in readers if s.role is Role.MATMUL and s.inputs == (value,))
        on = {v for s in readers if _passed(s) for v in s.outputs}
        if any(s.role in (Role.ACT, Role.GATE, Role.SCALE) for s in readers):
            on.update(activated(flow, value))
        todo += on - seen
        seen |= on


def _passed(step: Step) -> bool:
    return len(step.inputs) == 1 and (step.role in _PASSED or base(step.node.op) in MAXIMA)
