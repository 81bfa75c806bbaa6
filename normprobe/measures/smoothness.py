"""How fast the gradient of the loss turns and grows along a gradient step."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from normprobe.capture.guard import untouched
from normprobe.capture.watch import watch
from normprobe.measures.chains import differentiable
from normprobe.measures.extra import Extra, Subject
from normprobe.measures.loss import loss_of
from normprobe.measures.stand_ins import UndifferentiableError, differentiated, stand_ins
from normprobe.records import Basis, Skipped
from normprobe.records.extras import ExtraName
from normprobe.records.smoothness import GradientStep, SmoothnessMeasure

DISTANCES = (1e-4, 3e-4, 1e-3, 3e-3)  # of the parameters' own norm
ASTRAY = 0.1  # of a step: by how much rounding of the parameters may change it


class Smoothness(Extra):
    """Lipschitz constant of the loss gradient along the gradient step, β = max over t of ‖g(θ − t·g/‖g‖) − g(θ)‖ / t.

    g is the gradient of the loss by all parameters together, norms are over all of them, and t runs over `DISTANCES`
    times ‖θ‖, so that models of other sizes and after a rewrite take steps of the same relative length. For small t it
    is ‖Hg‖ / ‖g‖ with the Hessian H; a kink (ReLU) makes it jump. Without the division it is the gradient's change,
    and its loss against t the landscape along the gradient. Unit: loss / parameter². In eval mode: batch norms use
    their running statistics.

    Source: Santurkar et al. 2018, sec. 3.1 (effective β-smoothness and gradient predictiveness along the gradient).
    """

    name: ClassVar[ExtraName] = "smoothness"

    def measure(self, subject: Subject) -> tuple[SmoothnessMeasure | None, tuple[Skipped, ...]]:
        """One forward and one backward at θ, and one each at every distance."""
        why = differentiable(subject.model)
        if why is not None:
            return None, (Skipped(what="smoothness", why=why),)
        try:
            return _measured(subject)
        except UndifferentiableError as reason:
            return None, (Skipped(what="smoothness", why=str(reason)),)


class _Point(NamedTuple):
    """The loss and its gradient by parameter at one place."""

    loss: float
    name: str
    gradient: Mapping[Tensor, Tensor]


def _measured(subject: Subject) -> tuple[SmoothnessMeasure | None, tuple[Skipped, ...]]:
    start = _point(subject, {})
    size = _norm(start.gradient)
    length = _norm({p: p for p in start.gradient})
    if not (math.isfinite(size) and size > 0 and length > 0):
        found = "0" if size == 0 else f"{size}, that of the parameters {length}"
        return None, (Skipped(what="smoothness", why=f"there is no gradient step: the gradient's norm is {found}"),)
    steps, skipped = _steps(subject, start, size, length)
    if not steps:
        return None, skipped
    first = next(iter(start.gradient))
    measure = SmoothnessMeasure(
        loss=start.name,
        value=start.loss,
        basis=Basis(
            unit="loss / parameter²",
            dtype=str(first.dtype).removeprefix("torch."),
            count=sum(p.numel() for p in start.gradient),
        ),
        gradient_norm=size,
        parameter_norm=length,
        steps=steps,
        lipschitz=_largest([step.lipschitz for step in steps]),
    )
    return measure, skipped


def _steps(
    subject: Subject, start: _Point, size: float, length: float
) -> tuple[tuple[GradientStep, ...], tuple[Skipped, ...]]:
    steps, skipped = [], []
    for done, distance in enumerate(DISTANCES, 1):
        step = _step(subject, start, distance * length, size)
        subject.tell("smoothness", done, len(DISTANCES))
        if step is None:
            why = "the parameters' dtype rounds so short a step to another one"
            skipped.append(Skipped(what=f"smoothness at {distance} of the parameters' norm", why=why))
        else:
            steps.append(step)
    return tuple(steps), tuple(skipped)


def _step(subject: Subject, start: _Point, way: float, size: float) -> GradientStep | None:
    """None where rounding makes it another step."""
    moved = {p: p.detach() - (way / size) * g.to(p.dtype) for p, g in start.gradient.items()}
    astray = _norm(
        {p: moved[p].double() - p.detach().double() + (way / size) * g.double() for p, g in start.gradient.items()}
    )
    if not astray <= ASTRAY * way:
        return None
    there = _point(subject, moved)
    change = _norm({p: there.gradient[p] - g for p, g in start.gradient.items() if p in there.gradient})
    inner = math.fsum(_dot(there.gradient[p], g) for p, g in start.gradient.items() if p in there.gradient)
    sizes = _norm(there.gradient) * size
    return GradientStep(
        distance=way,
        loss=there.loss,
        gradient_change=change,
        cosine=inner / sizes if sizes else None,
        lipschitz=change / way,
    )


def _point(subject: Subject, moved: Mapping[Tensor, Tensor]) -> _Point:
    """Loss and gradient with some parameters moved; the gradient by the model's own parameters."""
    owners = dict(subject.model.named_parameters(remove_duplicate=False))
    with untouched(subject.model), stand_ins(subject.model, moved) as leaves:
        with differentiated("model"):
            watched = watch(subject.model, subject.inputs, {}, grad=True)
        with torch.enable_grad():
            value, name = loss_of(watched.output, subject.inputs, subject.anatomy, subject.loss)
        ways = {owners[n]: leaf for n, leaf in leaves.items() if leaf is not owners[n]}
        with differentiated("loss"):
            found = torch.autograd.grad([value], list(ways.values()), allow_unused=True)
    pairs = zip(ways, found, strict=True)
    dense: dict[Tensor, Tensor] = {}
    for parameter, gradient in pairs:
        if gradient is not None:
            dense[parameter] = gradient.to_dense() if gradient.layout != torch.strided else gradient
    return _Point(float(value.detach()), name, dense)


def _norm(parts: Mapping[Tensor, Tensor]) -> float:
    """L2 norm of all tensors together, summed in float64."""
    return math.sqrt(math.fsum(float(x.detach().double().square().sum()) for x in parts.values()))


def _dot(a: Tensor, b: Tensor) -> float:
    return float((a.double() * b.double()).sum())


def _largest(values: Sequence[float]) -> float:
    return math.nan if any(map(math.isnan, values)) else max(values)
