"""What operations of other libraries do to tokens: they are run on random numbers."""

from __future__ import annotations

import math
from itertools import product
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from normprobe.anatomy.flow.ops import Role, foreign
from normprobe.anatomy.flow.steps import Flow, Step
from normprobe.capture.leaves import replaced
from normprobe.capture.trace import Ref

_LARGEST = 1 << 22  # elements of all arguments; operations on larger ones are not run
_FAR = 1e-2  # share of its size by which a result may differ from that of attention, in half precision too

Mixing = Literal["attention", "other"]


def mixing(flow: Flow, step: Step) -> Mixing | None:
    """How an operation of another library brings rows (all axes but the last) together: as the softmax of products of
    its first three signals does, or otherwise. None where it acts on each row alone, and where it cannot be run."""
    schema = getattr(step.node.function, "_schema", None)
    if step.role is not Role.HEAVY or not foreign(step.node.op) or schema is None or schema.is_mutable:
        return None
    key = ("mixing", step.node.op, tuple(flow.shape(v) for v in step.node.inputs), repr(step.node.kwargs))
    if key not in flow.memo:
        given = _drawn(flow, step)
        try:
            with torch.no_grad():
                flow.memo[key] = None if given is None else _mixing(step, given)
        except Exception:  # a kernel of another device, or with demands on its arguments
            flow.memo[key] = None
    found: Mixing | None = flow.memo[key]
    return found


def _drawn(flow: Flow, step: Step) -> dict[int, Tensor] | None:
    """Random floats and known indices and masks in the place of all tensors that a step reads."""
    generator, found = torch.Generator().manual_seed(0), {}
    if sum(math.prod(flow.shape(v)) for v in step.node.inputs) > _LARGEST:
        return None
    for value in step.node.inputs:
        drawn: Tensor | None = None
        if flow.floating(value):
            drawn = torch.randn(flow.shape(value), generator=generator).to(flow.trace.values[value].dtype)
        elif not flow.levels.signal(value):
            drawn = flow.statics.tensor(value)
        if drawn is None:
            return None
        found[value] = drawn
    return found


def _mixing(step: Step, given: dict[int, Tensor]) -> Mixing | None:
    before = _run(step, given)
    changed = {v: t.clone() for v, t in given.items()}
    for value in step.inputs:
        changed[value].flatten(0, -2)[0] += 1
    moved = (_run(step, changed) != before).any(-1).flatten()
    if not bool(moved[1:].any()):
        return None
    return "attention" if len(step.inputs) > 2 and _attends(before, [given[v] for v in step.inputs[:3]]) else "other"


def _run(step: Step, given: dict[int, Tensor]) -> Tensor:
    args, kwargs = replaced((step.node.args, step.node.kwargs), lambda ref: given[ref.value], of=Ref)
    made = step.node.function(*args, **kwargs)
    found: Tensor = made[0] if isinstance(made, (tuple, list)) else made
    return found.double()


def _attends(made: Tensor, operands: list[Tensor]) -> bool:
    """Whether a result is attention, with the tokens on the last axis but one or two, of all keys or the earlier."""
    for turned, causal in product((False, True), repeat=2):
        q, k, v = (t.double().transpose(1, 2) if turned else t.double() for t in operands)
        if k.shape != v.shape or (causal and q.shape[-2] != k.shape[-2]) or q.shape[-3] % k.shape[-3]:
            continue
        known = F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=q.shape[-3] != k.shape[-3])
        known = known.transpose(1, 2) if turned else known
        if known.shape == made.shape and bool((known - made).norm() <= _FAR * known.norm()):
            return True
    return False
