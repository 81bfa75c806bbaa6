"""What the output of a product passes first: an activation, a gate, a norm, a softmax."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from normprobe.anatomy.flow.levels import Level
from normprobe.anatomy.flow.ops import LIGHT, Role, base
from normprobe.anatomy.flow.steps import Flow, Step
from normprobe.capture.leaves import replaced
from normprobe.capture.trace import Ref
from normprobe.records.weights import Follower

_NAMES: Mapping[Role, Follower] = {Role.NORM: "norm", Role.SOFTMAX: "softmax", Role.GATE: "gate"}
_POINTWISE = frozenset({Role.ACT, Role.SCALE, Role.SHIFT, Role.GATE, Role.ADD})
_FURTHEST = 24  # operations that one activation may consist of
_POINTS = torch.linspace(-4.0, 4.0, 33, dtype=torch.float64)
_CLOSE = 2e-4  # the approximations of GELU by a tanh differ from it by up to 5e-4
_KNOWN: Mapping[Follower, Callable[[Tensor], Tensor]] = {
    "relu": torch.relu,
    "silu": F.silu,
    "tanh": torch.tanh,
    "sigmoid": torch.sigmoid,
    "gelu": F.gelu,
}


class Activation(NamedTuple):
    """A known function; `slope` is that of a leaky ReLU below 0, else None."""

    name: Follower
    slope: float | None = None


def follower(flow: Flow, product: Step) -> Activation:
    """What the output of `product` passes first besides biases, views, casts and constant factors.

    Of several ways an activation tells more than the gate beside it, and anything more than an add or a product.
    """
    found: dict[Follower, float | None] = {}
    todo, seen = list(product.outputs), set(product.outputs)
    while todo:
        value = todo.pop()
        readers = flow.readers(value)
        bending = [s for s in readers if s.role not in LIGHT]
        acting = len(readers) > 1 or any(s.role in (Role.ACT, Role.GATE) for s in readers)
        known = _activation(flow, value, readers) if acting else None
        if known is not None:
            found[known.name] = known.slope
            continue
        found |= {_NAMES.get(s.role, "unknown" if s.role is Role.ACT else "none"): None for s in bending}
        fresh = [v for s in readers if s.role in LIGHT for v in s.outputs if v not in seen]
        seen.update(fresh)
        todo += fresh
    for idle in ("none", "gate"):
        if len(found) > 1:
            found.pop(idle, None)
    return Activation(*found.popitem()) if len(found) == 1 else Activation("unknown" if found else "none")


def activated(flow: Flow, value: int) -> tuple[int, ...]:
    """What holds a known function of `value`; nothing where none is computed of it."""
    readers = flow.readers(value)
    if all(s.role is Role.ACT and len(s.inputs) == 1 for s in readers):
        known = _activation(flow, value, readers) if readers else None
        return () if known is None else tuple(s.outputs[0] for s in readers)
    known, held = _computed(flow, value)
    return () if known is None else (held,)


def _activation(flow: Flow, value: int, readers: list[Step]) -> Activation | None:
    """The known function that pointwise operations on a value compute, the last one in time; None where none fits.

    Of one operation it is remembered, where that has the same arguments again."""
    key = ("activation", tuple((s.node.op, repr(s.node.args[1:]), len(s.inputs)) for s in readers))
    single = all(s.role is Role.ACT and len(s.inputs) == 1 for s in readers)
    if not single or key not in flow.memo:
        found, _ = _computed(flow, value)
        if not single:
            return found
        flow.memo[key] = found
    known: Activation | None = flow.memo[key]
    return known


def at_zero(flow: Flow, step: Step) -> tuple[float, float] | None:
    """What an operation on one signal makes of 0, and its slope there as autograd has it; None where it also reads what
    is learned, or cannot be run."""
    with torch.enable_grad():
        zero = torch.zeros_like(_POINTS, requires_grad=True)
        made = _run(flow, step, {step.inputs[0]: zero})
        if made is None or not made.requires_grad:
            return None
        (slope,) = torch.autograd.grad(made.sum(), zero)
    return float(made.detach()[0]), float(slope[0])


def _computed(flow: Flow, value: int) -> tuple[Activation | None, int]:
    """The known function of `value` that pointwise operations compute, the last one in time, and the value that holds
    it; None and `value` itself where none fits."""
    curves: dict[int, Tensor] = {value: _POINTS}
    best: tuple[Activation | None, int] = (None, value)
    todo = [value]
    while todo and len(curves) < _FURTHEST:
        for step in flow.readers(todo.pop(0)):
            if step.role not in _POINTWISE or step.outputs[0] in curves or any(v not in curves for v in step.inputs):
                continue
            curve = _run(flow, step, curves)
            if curve is not None:
                curves[step.outputs[0]] = curve
                todo.append(step.outputs[0])
                name = _named(curve)
                best = best if name is None else (name, step.outputs[0])
    return best


def _run(flow: Flow, step: Step, curves: Mapping[int, Tensor]) -> Tensor | None:
    """What a pointwise operation makes of the curves; None where it also reads what is learned or not one number."""

    def content(ref: Ref) -> Any:
        if ref.value in curves:
            return curves[ref.value]
        constant = flow.levels.of[ref.value] is Level.STATIC and not flow.levels.parameters(ref.value)
        number = flow.statics.number(ref.value) if constant else None
        return None if number is None else torch.tensor(number, dtype=torch.float64)

    args, kwargs = replaced((step.node.args, step.node.kwargs), content, of=Ref)
    if base(step.node.op).endswith("_"):
        args = tuple(a.clone() if isinstance(a, Tensor) else a for a in args)
    try:
        output = step.node.function(*args, **kwargs)
    except (RuntimeError, TypeError):
        return None
    same = isinstance(output, Tensor) and output.shape == _POINTS.shape
    return output.double() if same else None


def _named(curve: Tensor) -> Activation | None:
    for name, function in _KNOWN.items():
        if bool(((curve - function(_POINTS)).abs() < (5 * _CLOSE if name == "gelu" else _CLOSE)).all()):
            return Activation(name)
    below, above = _POINTS < 0, _POINTS > 0
    slopes = curve[below] / _POINTS[below]
    straight = bool((curve[above] - _POINTS[above]).abs().max() < _CLOSE)
    leaks = straight and bool((slopes - slopes[0]).abs().max() < _CLOSE) and 0 < float(slopes[0]) < 1 - _CLOSE
    return Activation("leaky_relu", float(slopes[0])) if leaks else None
