"""Where a branch without a norm at its start reads the stream, and the constant through which it does."""

from __future__ import annotations

import math

from normprobe.anatomy.flow.ops import ACCUMULATING, LIGHT, Role, base
from normprobe.anatomy.flow.sites import op_site
from normprobe.anatomy.flow.steps import Flow, Step
from normprobe.anatomy.flow.walk import argument_value, constant_factor, first_readers
from normprobe.anatomy.streams.parts import Part
from normprobe.anatomy.streams.writes import Write
from normprobe.records.anatomy import Entry

_PASSED = LIGHT | {Role.ACT, Role.POOL}
_CLOSE = 1e-6


def entry(flow: Flow, write: Write, part: Part) -> Entry | None:
    """The first product of a branch, and the constant factor on what it reads.

    None where something else than activations, poolings and factors stands between the trunk and its weights, a norm
    for one.
    """
    products = first_readers(flow, write.source, part.core, _PASSED)
    if not products or not all(s.role is Role.MATMUL and s.parameters and len(s.inputs) == 1 for s in products):
        return None
    factors = [_factor(flow, write.source, step.inputs[0]) for step in products]
    known = [f for f in factors if f is not None]
    alike = len(known) == len(factors) and all(math.isclose(f, known[0], rel_tol=_CLOSE) for f in known)
    first = products[0]
    return Entry(scale=known[0] if alike else None, site=op_site(flow, first), operand=_operand(first))


def _factor(flow: Flow, source: int, value: int) -> float | None:
    """The constant from `source` to `value`, activations and poolings passed; None where it is not constant."""
    factor = 1.0
    while value != source:
        step = flow.made_by(value)
        known = None if step is None or len(step.inputs) != 1 else 1.0
        if known is not None and step is not None and step.role is Role.SCALE:
            known = constant_factor(flow, step)
        if known is None or step is None:
            return None
        factor, value = factor * known, step.inputs[0]
    return factor


def _operand(step: Step) -> int:
    """Which of the two factors of a product is the signal."""
    values = [v for v in map(argument_value, step.node.args) if v is not None]
    first = 1 if base(step.node.op) in ACCUMULATING else 0
    return 0 if values[first] in step.inputs else 1
