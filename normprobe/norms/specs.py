"""Put together what was found about a statistic norm: kind, gain, eps, reduction, cast order, and the evidence."""

from __future__ import annotations

from math import isfinite

import torch

from normprobe.norms import precision
from normprobe.norms.eps import Eps, as_tensor, recover, rounded, shrinkage
from normprobe.norms.fit import Fit, rows
from normprobe.norms.kinds import Named, name
from normprobe.norms.layout import Layout
from normprobe.norms.module_subject import SIDE
from normprobe.norms.subject import Instance, Subject
from normprobe.records import NormSpec
from normprobe.records.anatomy import Reduction, WeightMultiply

SEED = 1


def statistic_spec(subject: Subject, exact: Instance, fit: Fit, train: bool = False) -> NormSpec:
    """The record of a norm whose form is `fit`; `train` where it was found in train mode."""
    x = rows(subject.shape, SEED)[0].to(device=subject.device, dtype=exact.dtype)
    fused = precision.fused_op(precision.operations(exact, x))
    named = name(fit, exact.tensors, fused.name if fused else None, SIDE)
    eps = _eps(subject, fit, named, train)
    reduced, why_reduced = _reduction(subject, fit, train)
    multiply, why_multiply = _multiply(subject, fit, named, fused, reduced, train)
    layout, over_rows = fit.layout, 0 in fit.layout.axes and len(fit.layout.shape) > 1
    evidence = (
        f"outputs fit gain · {'(x - mean)' if fit.centred else 'x'} / rms over axes {signed(layout)} "
        f"of {layout.shape} within {fit.residual:.1g}" + (" in train mode" if train else ""),
        *([f"only the slice {layout.part[1]}:{layout.part[2]} of axis {layout.part[0]}"] if layout.part else []),
        *[text for text in (named.note, eps.note, why_reduced, why_multiply) if text],
    )
    return NormSpec(
        kind=named.kind,
        subtracts_mean=fit.centred,
        affine=named.affine.form,
        eps=eps.value,
        eps_placement=eps.placement,
        reduction=reduced,
        weight_multiply=multiply,
        axes=signed(layout),
        groups=named.groups,
        size=None if over_rows or _shortened(subject, layout) else layout.size,
        batch_dependent=over_rows,
        fused=fused is not None,
        weight=named.affine.weight,
        bias=named.affine.bias,
        device=subject.device.type,
        evidence=evidence,
    )


def unknown_spec(subject: Subject, exact: Instance, layout: Layout) -> NormSpec | None:
    """`unknown` for what keeps its output size when its input grows, element for element; None for the rest."""
    base = rows(subject.shape, SEED + 3)[0]
    x = (2.0**10 * base).to(device=subject.device, dtype=exact.dtype)
    y, doubled, negated = exact.call(x), exact.call(2 * x), exact.call(-x)
    largest = float((y - negated).abs().amax())
    if not (isfinite(largest) and largest > 0):
        return None
    if float((doubled - y).abs().amax()) > 1e-3 * largest:
        return None
    if float((y + negated - (y + negated).mean(0, keepdim=True)).abs().amax()) > 1e-3 * largest:
        return None
    share = _own_share(exact, x)
    if share < 2.0:
        return None
    told = f"output does not grow with its input, over axes {signed(layout)}, but fits no closed form"
    return NormSpec(kind="unknown", axes=signed(layout), device=subject.device.type, evidence=(told,))


def _own_share(exact: Instance, x: torch.Tensor) -> float:
    """How much more an output moves with its own input than the median of the others that move; inf where alone."""
    ratios = []
    for place in (tuple(n // 2 for n in x.shape), tuple(n // 3 for n in x.shape)):
        pushed = x.clone()
        pushed[place] += 0.05 * x.square().mean().sqrt()
        change = (exact.call(pushed) - exact.call(x)).abs()
        own = float(change[place])
        change[place] = 0
        others = change[change > 0]
        ratios.append(own / float(others.median()) if len(others) else float("inf"))
    return min(ratios)


def signed(layout: Layout) -> tuple[int, ...]:
    """The reduced axes, counted from the end where they are the last ones."""
    rank, axes = len(layout.shape), layout.axes
    trailing = axes == tuple(range(rank - len(axes), rank)) and len(axes) < rank
    return tuple(axis - rank for axis in axes) if trailing or rank == 1 else axes


def _shortened(subject: Subject, layout: Layout) -> bool:
    """Whether a reduced axis has a size of its own choice, so that the statistic's size depends on the input."""
    recorded = getattr(subject, "recorded", layout.shape)
    space = len(layout.shape) > 2 and set(layout.axes) & set(range(2, len(layout.shape)))
    moved = any(recorded[axis] != layout.shape[axis] for axis in layout.axes)
    return moved or bool(space and layout.groups is not None)


def _eps(subject: Subject, fit: Fit, named: Named, train: bool) -> Eps:
    """Eps in force in the working dtype; half dtypes that cannot resolve it fall back on float32, and say so."""
    working = subject.dtype if subject.dtype in (torch.float32, *precision.HALF) else torch.float32
    wide = torch.float32 if working in precision.HALF else working
    eps = _recover(subject, fit, wide, train)
    if eps.placement == "unknown" and wide is torch.float32:
        double = _recover(subject, fit, torch.float64, train)
        eps = eps if double.placement == "unknown" else Eps(double.value, double.placement, f"in float64: {double.note}")
    if working in precision.HALF:
        eps = _in_half(eps, _recover(subject, fit, working, train), working)
    original = subject.instance(torch.float64, None).tensors
    eps = as_tensor(eps, subject.instance(torch.float64, SEED).tensors, original)
    if eps.value is None:
        return eps
    factor = named.unit if eps.placement == "inside_sqrt" else named.unit**0.5
    value = eps.value if factor == 1.0 else rounded(eps.value * factor, eps.spread)
    return Eps(value, eps.placement, eps.note, eps.spread)


def _in_half(wide: Eps, half: Eps, dtype: torch.dtype) -> Eps:
    """The half measurement where it is resolved and says something else, else the float32 one."""
    short = str(dtype)[6:]
    if half.value is None or wide.value is None or half.placement != wide.placement:
        return Eps(wide.value, wide.placement, f"on a float32 copy: {wide.note}; {short} itself: {half.note}", wide.spread)
    if abs(half.value - wide.value) <= 0.1 * wide.value:
        return Eps(wide.value, wide.placement, f"{wide.note}, in float32 and {short} alike", wide.spread)
    return Eps(half.value, half.placement, f"in {short}: {half.note}; float32 has {wide.value:.4g}", half.spread)


def _recover(subject: Subject, fit: Fit, dtype: torch.dtype, train: bool) -> Eps:
    instance = subject.instance(dtype, SEED, train=train)

    def zero_row_finite() -> bool:
        zeros = torch.zeros(subject.shape, dtype=dtype, device=subject.device)
        return bool(instance.call(zeros).isfinite().all())

    return recover(shrinkage(instance, fit, subject.device, SEED + 2), dtype, zero_row_finite)


def _reduction(subject: Subject, fit: Fit, train: bool) -> tuple[Reduction, str]:
    try:
        return precision.reduction(subject.instance(torch.float16, SEED, train=train), fit, subject.device)
    except (RuntimeError, TypeError, ValueError) as error:
        return "unknown", f"float16 does not run here: {str(error).splitlines()[0]}"


def _multiply(
    subject: Subject, fit: Fit, named: Named, fused: precision.Op | None, reduced: Reduction, train: bool
) -> tuple[WeightMultiply, str]:
    if named.affine.form == "none":
        return "none", ""
    if fused is not None and _takes_gain(fused):
        return "fused", f"gain is an argument of {fused.name}"
    dtype = subject.dtype if subject.dtype in precision.HALF else torch.bfloat16
    try:
        instance = subject.instance(dtype, SEED, train=train)
        return precision.weight_multiply(instance, fit, subject.device, reduced, 64.0)
    except (RuntimeError, TypeError, ValueError) as error:
        return "unknown", f"{str(dtype)[6:]} does not run here: {str(error).splitlines()[0]}"


def _takes_gain(op: precision.Op) -> bool:
    """Whether the kernel was given more tensors than the input (a norm without gain takes the input alone)."""
    return op.tensors > (3 if "batch_norm" in op.name else 1)
