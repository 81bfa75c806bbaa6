"""The name of a fitted form: which norm it is, by its axes, its mean, its groups and where its gain runs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from normprobe.norms.affine import MATCH, Affine, Match, describe, match
from normprobe.norms.fit import Fit
from normprobe.norms.layout import Layout
from normprobe.records.norms import NormKind

FLAT = 1e-6  # relative range below which a gain is constant along an axis


@dataclass(frozen=True)
class Named:
    """A kind with its affine form. `unit` is the written statistic's square over the mean square.

    It is 1 for root mean square forms, the number of elements n for L2 forms, n/(n - 1) for the unbiased
    deviation.
    """

    kind: NormKind
    affine: Affine
    groups: int | None
    unit: float
    note: str


def name(fit: Fit, tensors: Mapping[str, Tensor], fused: str | None, side: float) -> Named:
    """Name the form `fit`.

    Args:
        fit: a form that holds.
        tensors: the instance's tensors, which gain and offset are compared with.
        fused: the fused kernel among its operations, which tells apart forms that compute the same.
        side: constant that other arguments held, by which a gate may have multiplied the output.
    """
    if fit.centred:
        return _centred(fit, tensors, fused, side)
    return _uncentred(fit, tensors, side)


def _uncentred(fit: Fit, tensors: Mapping[str, Tensor], side: float) -> Named:
    n, groups = fit.layout.size, fit.layout.groups
    rms = match(fit.gain, tensors, (1.0, side))
    l2 = match(fit.gain * n**0.5, tensors, (1.0, side))
    if 0 in fit.layout.axes and len(fit.layout.shape) > 1:
        told = "root mean square over the rows as well"
        return Named("unknown", _affine(fit, rms, tensors), groups, 1.0, told)
    if rms is None and l2 is not None:
        kind: NormKind = "scalenorm" if l2.name is not None and l2.scalar else "l2norm"
        affine = _affine(fit, l2, tensors, n**0.5)
        return Named(kind, affine, groups, float(n), "divides by the L2 norm: " + affine.note)
    affine = _affine(fit, rms, tensors)
    told = "divides by the root mean square: " + affine.note
    return Named("scalenorm" if rms is not None and rms.name and rms.scalar else "rmsnorm", affine, groups, 1.0, told)


def _centred(fit: Fit, tensors: Mapping[str, Tensor], fused: str | None, side: float) -> Named:
    n = fit.layout.size
    unbiased = (n / (n - 1)) ** 0.5
    factors = (1.0, side, 1 / unbiased)
    gain = match(fit.gain, tensors, factors)
    affine = _affine(fit, gain, tensors)
    unit, note = 1.0, affine.note
    if affine.factor == 1 / unbiased:
        unit, note = n / (n - 1), f"divides by the unbiased deviation (n - 1 = {n - 1}): {affine.note}"
    kind, groups, why = _centred_kind(fit, fused)
    return Named(kind, affine, groups, unit, "; ".join(part for part in (note, why) if part))


def _affine(fit: Fit, gain: Match | None, tensors: Mapping[str, Tensor], factor: float = 1.0) -> Affine:
    scale = float(fit.gain.abs().amax())
    return describe(gain, fit.offset, scale * factor, tensors)


def _centred_kind(fit: Fit, fused: str | None) -> tuple[NormKind, int | None, str]:
    layout, rank = fit.layout, len(fit.layout.shape)
    axes = set(layout.axes)
    inner = {axis for axis in range(1, rank) if layout.shape[axis] > 1}
    space = {axis for axis in range(2, rank) if layout.shape[axis] > 1}
    if 0 in axes and rank > 1:
        return _batch_kind(layout)
    if layout.groups is not None:
        return "groupnorm", layout.groups, f"{layout.groups} groups on axis {layout.group_axis}"
    along = varying(fit)
    if rank > 2 and axes == space and space:
        return _over_space(layout, along, fused)
    if rank > 2 and axes == inner and 1 in axes:
        per_channel = len(along) == 1 and len(axes) > 1
        if per_channel or along == {1} or (not along and fused == "native_group_norm"):
            return "groupnorm", 1, "one group: statistics over channels and space, gain per channel"
    if rank == 3 and axes == {1} and along == {2}:
        return "instancenorm", None, "statistics over axis 1, gain along the last axis"
    return "layernorm", None, ""


def _batch_kind(layout: Layout) -> tuple[NormKind, int | None, str]:
    kept = [layout.shape[axis] for axis in range(1, len(layout.shape)) if axis not in layout.axes]
    if layout.groups is not None or not kept or sum(size > 1 for size in kept) > 1:
        return "unknown", layout.groups, "statistics over the rows, but not one for each channel"
    return "batchnorm", None, "statistics over the rows"


def _over_space(layout: Layout, along: set[int], fused: str | None) -> tuple[NormKind, int | None, str]:
    """Statistics over every axis after the first two: a channel's map, or a layer norm of the last axes."""
    channels = layout.shape[1]
    if along and not along <= {1}:
        return "layernorm", None, ""
    if fused == "native_group_norm":
        return "groupnorm", channels, f"{channels} groups of one channel each"
    if along or (fused is not None and "batch_norm" in fused):
        return "instancenorm", None, "statistics over space for each channel"
    if fused is None and len(layout.shape) > 3:
        return "instancenorm", None, "statistics over space for each channel, no gain"
    return "layernorm", None, ""


def varying(fit: Fit) -> set[int]:
    """Axes of the input along which gain or offset is not constant."""
    found = set()
    for value in (fit.gain, fit.offset):
        largest = float(value.abs().amax())
        for axis in range(value.ndim):
            spread = value - value.narrow(axis, 0, 1)
            if largest and float(spread.abs().amax()) > max(FLAT, MATCH) * largest:
                found.add(_input_axis(fit.layout, axis))
    return found


def _input_axis(layout: Layout, axis: int) -> int:
    """The axis of the input that an axis of the view belongs to."""
    if layout.group_axis is None or axis <= layout.group_axis:
        return axis
    return axis - 1
