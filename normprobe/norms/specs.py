"""Put together what was found about a statistic norm: kind, gain, eps, dtypes, and the evidence."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace

import torch

from normprobe.norms import precision
from normprobe.norms.eps import Eps, as_tensor, recover, rounded, shrinkage
from normprobe.norms.fit import Fit, rows
from normprobe.norms.kinds import Named, name
from normprobe.norms.layout import Layout
from normprobe.norms.module_subject import SIDE
from normprobe.norms.subject import Instance, Subject
from normprobe.records import NormSpec
from normprobe.records.norms import Clamped, Reduction, WeightMultiply

SEED = 1


def statistic_spec(subject: Subject, exact: Instance, fit: Fit, train: bool = False) -> NormSpec:
    """The record of a norm whose form is `fit`; `train` where it was found in train mode."""
    ops = precision.operations(exact, rows(subject.shape, SEED)[0].to(subject.device, exact.dtype))
    fused = precision.fused_op(ops)
    named = name(fit, exact.tensors, fused.name if fused else None, SIDE)
    numbers = {number for op in ops for number in op.numbers}
    eps = _eps(subject, fit, named, train, numbers) if fit.scaled is None else _scaled(fit.scaled)
    reduced, why_reduced = _reduction(subject, fit, train)
    multiply, why_multiply = _multiply(subject, fit, named, fused, train)
    layout = fit.layout
    notes = [note for note in (named.note, eps.note, why_reduced, why_multiply) if note]
    return NormSpec(
        kind=named.kind,
        subtracts_mean=fit.centred,
        unbiased=fit.centred and named.unit != 1.0,
        affine=named.affine.form,
        eps=eps.value,
        eps_placement=eps.placement,
        eps_clamps=eps.clamps,
        reduction=reduced,
        weight_multiply=multiply,
        axes=signed(layout),
        groups=named.groups,
        size=_size(subject, layout, named),
        batch_dependent=0 in layout.axes and len(layout.shape) > 1,
        fused=fused is not None or precision.unseen(ops),
        weight=named.affine.weight,
        bias=named.affine.bias,
        device=subject.device.type,
        evidence=(_form(fit, train), *_part(layout), *notes),
    )


def _form(fit: Fit, train: bool) -> str:
    inner, mode = "(x - mean)" if fit.centred else "x", " in train mode" if train else ""
    place = f"axes {signed(fit.layout)} of {fit.layout.shape}"
    return f"outputs fit gain · {inner} / rms over {place} within {fit.residual:.1g}{mode}"


def _part(layout: Layout) -> list[str]:
    if layout.part is None:
        return []
    axis, start, stop = layout.part
    return [f"only the slice {start}:{stop} of axis {axis} is normalised"]


def signed(layout: Layout) -> tuple[int, ...]:
    """The reduced axes, counted from the end where they are the last ones."""
    rank, axes = len(layout.shape), layout.axes
    trailing = axes == tuple(range(rank - len(axes), rank)) and len(axes) < rank
    return tuple(axis - rank for axis in axes) if trailing or rank == 1 else axes


def _size(subject: Subject, layout: Layout, named: Named) -> int | None:
    """Number of elements that share a statistic; None where rows or space, of free extent, are among them."""
    over_space = any(axis != 1 for axis in layout.axes) and len(layout.shape) > 2
    if named.kind in ("batchnorm", "instancenorm") or (named.kind == "groupnorm" and over_space):
        return None
    free = any(subject.recorded_shape[axis] != layout.shape[axis] for axis in layout.axes)
    return None if free else layout.size


def _eps(subject: Subject, fit: Fit, named: Named, train: bool, numbers: Collection[float]) -> Eps:
    """Eps in force in the working dtype; where a half dtype cannot resolve it float32 does, and says so.

    `numbers` are the constants of the norm's operations: eps as it is written is one of them.
    """
    working = subject.dtype if subject.dtype in (torch.float32, *precision.HALF) else torch.float32
    wide = torch.float32 if working in precision.HALF else working
    eps = _recover(subject, fit, wide, train)
    if eps.placement == "unknown" and wide is torch.float32:
        double = _recover(subject, fit, torch.float64, train)
        if double.placement != "unknown":
            eps = replace(double, note=f"in float64: {double.note}")
    if working in precision.HALF:
        eps = _in_half(eps, _recover(subject, fit, working, train), working)
    drawn = subject.instance(torch.float64, SEED).tensors
    if any(tensor.numel() == 1 for tensor in drawn.values()):
        eps = as_tensor(eps, drawn, subject.instance(torch.float64, None).tensors)
    n = fit.layout.size
    other = n / (n - 1) if fit.centred else n
    eps = replace(eps, clamps=_clamps(eps, (named.unit, 1.0, other), numbers))
    unit = named.unit if eps.value is None else _unit(eps, named.unit, other, numbers)
    if eps.value is None or unit == 1.0:
        return eps
    value = _written(eps.value, eps, unit)
    return replace(eps, value=value, note=f"{eps.note} of the mean square, {value:.4g} as it is written")


def _written(value: float, eps: Eps, unit: float) -> float:
    return rounded(value * (unit if eps.placement == "inside_sqrt" else unit**0.5), eps.spread)


def _unit(eps: Eps, unit: float, other: float, numbers: Collection[float]) -> float:
    """The written statistic's square over the mean square: 1, the number of elements or that of an unbiased variance
    (`other`); `unit` where the constants do not tell (`F.normalize(x) * n**0.5` is a root mean square norm whose eps is
    compared with the L2 norm)."""
    assert eps.value is not None
    seen = [u for u in (unit, 1.0, other) if any(_close(_written(eps.value, eps, u), n) for n in numbers)]
    return seen[0] if seen else unit


def _clamps(eps: Eps, units: Sequence[float], numbers: Collection[float]) -> Clamped | None:
    """Whether the constants hold eps, as a bound of the root, or its square; None where they tell neither or both."""
    if eps.placement != "clamp" or eps.value is None:
        return None
    root = any(_close(eps.value * unit**0.5, n) for unit in units for n in numbers)
    square = any(_close(eps.value**2 * unit, n) for unit in units for n in numbers)
    return None if root == square else "root" if root else "mean_square"


def _close(value: float, number: float) -> bool:
    return number > 0 and abs(value - number) <= 0.01 * number


def _scaled(factor: float) -> Eps:
    told = f"eps {factor:.4g} times the row's largest square, at every scale"
    return Eps(rounded(factor, 0.0), "scaled", told)


def _in_half(wide: Eps, half: Eps, dtype: torch.dtype) -> Eps:
    """The half measurement where it is resolved and says something else, else the float32 one."""
    short = str(dtype)[6:]
    if half.value is None or wide.value is None or half.placement != wide.placement:
        return replace(wide, note=f"on a float32 copy: {wide.note}; {short} itself: {half.note}")
    if abs(half.value - wide.value) <= 0.1 * wide.value:
        return replace(wide, note=f"{wide.note}, in float32 and {short} alike")
    return replace(half, note=f"in {short}: {half.note}; float32 has {wide.value:.4g}")


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
    subject: Subject, fit: Fit, named: Named, fused: precision.Op | None, train: bool
) -> tuple[WeightMultiply, str]:
    if named.affine.form == "none":
        return "none", ""
    if fused is not None and fused.takes_gain:
        return "fused", f"gain is an argument of {fused.name}"
    dtype = subject.dtype if subject.dtype in precision.HALF else torch.bfloat16
    try:
        instance = subject.instance(dtype, SEED, train=train)
        return precision.weight_multiply(instance, fit, subject.device, 64.0)
    except (RuntimeError, TypeError, ValueError) as error:
        return "unknown", f"{str(dtype)[6:]} does not run here: {str(error).splitlines()[0]}"
