"""Norms whose statistics are stored in buffers: setting the variance shows `w / sqrt(variance + eps)`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from normprobe.norms.affine import MATCH, Affine, describe, match, placements
from normprobe.norms.eps import Eps, recover
from normprobe.norms.fit import linear_form
from normprobe.norms.subject import Instance, Subject
from normprobe.records import NormSpec

SEED = 1
_LARGE = (2.0**30, 2.0**36)  # variances at which eps does not count


@dataclass(frozen=True)
class Stored:
    """A scale that falls with the square root of the buffer `variance`; `gain` is its factor, float64."""

    variance: str
    gain: Tensor


def identify(subject: Subject, exact: Instance, refused: str | None) -> NormSpec | None:
    """The record of a batch norm that runs on stored statistics; None where no buffer acts as a variance.

    Args:
        subject: a subject whose outputs are linear, each in its own input alone.
        exact: its instance.
        refused: why train mode could not be run, None where it ran and used the stored statistics as well.
    """
    stored = _find(subject, exact)
    if stored is None:
        return None
    form = linear_form(exact, subject)
    assert form is not None
    mean, bias = _mean_and_bias(form, exact)
    others = {n: t for n, t in exact.tensors.items() if n != stored.variance}
    offset = torch.zeros_like(form[1]) if bias is None else exact.tensors[bias].double().cpu()
    affine = describe(match(stored.gain, others), offset, 1.0, others)
    seen = "train mode uses them as well" if refused is None else refused
    told = f"scale falls with the root of {stored.variance}, mean {mean or 'not subtracted'}; {seen}"
    return _spec(subject, stored, form[0], mean is not None, affine, told).model_copy(
        update={"frozen": refused is None}
    )


def statistics(subject: Subject) -> tuple[str | None, str] | None:
    """The names of the stored mean (None: none is subtracted) and variance; None where no buffer acts as a variance."""
    exact = subject.instance(torch.float64, SEED)
    stored, form = _find(subject, exact), linear_form(exact, subject)
    return None if stored is None or form is None else (_mean_and_bias(form, exact)[0], stored.variance)


def _spec(subject: Subject, stored: Stored, gain: Tensor, centred: bool, affine: Affine, told: str) -> NormSpec:
    eps = _eps(subject, stored)
    channels = [axis for axis in range(gain.ndim) if _varies(gain, axis)]
    return NormSpec(
        kind="batchnorm",
        subtracts_mean=centred,
        affine=affine.form,
        eps=eps.value,
        eps_placement=eps.placement,
        weight=affine.weight,
        bias=affine.bias,
        axes=tuple(axis for axis in range(len(subject.shape)) if axis not in channels),
        weight_multiply="unknown" if affine.form != "none" else "none",
        device=subject.device.type,
        evidence=(told, affine.note, eps.note),
    )


def _find(subject: Subject, exact: Instance) -> Stored | None:
    for name in exact.tensors:
        if name in exact.parameters:
            continue
        gains = [_gain(subject, exact.dtype, name, variance) for variance in _LARGE]
        if any(gain is None for gain in gains):
            continue
        small, large = (g * v**0.5 for g, v in zip(gains, _LARGE, strict=True) if g is not None)
        if float((small - large).abs().amax()) <= MATCH * float(large.abs().amax()):
            return Stored(name, large)
    return None


def _gain(subject: Subject, dtype: torch.dtype, name: str, value: float) -> Tensor | None:
    """The gain with every element of one buffer set to `value`; None where the map is not linear then."""
    instance = subject.instance(dtype, SEED)
    instance.tensors[name].fill_(value)
    form = linear_form(instance, subject)
    return None if form is None else form[0]


def _eps(subject: Subject, stored: Stored) -> Eps:
    shrink = _shrink(subject, stored, torch.float32)

    def zero_finite() -> bool:
        return _gain(subject, torch.float32, stored.variance, 0.0) is not None

    return recover(shrink, torch.float32, zero_finite)


def _shrink(subject: Subject, stored: Stored, dtype: torch.dtype) -> Callable[[float], tuple[float, float]]:
    def at(scale: float) -> tuple[float, float]:
        gain = _gain(subject, dtype, stored.variance, scale**2)
        if gain is None:
            return scale**2, float("nan")
        return scale**2, float((gain * scale / stored.gain).mean())

    return at


def _mean_and_bias(form: tuple[Tensor, Tensor], exact: Instance) -> tuple[str | None, str | None]:
    """Names of the tensors with which `offset = bias - mean · gain` holds."""
    gain, offset = form
    scale = float(offset.abs().amax())
    if scale == 0.0:
        return None, None
    zero = {"": torch.zeros((), dtype=torch.float64, device="cpu")}
    values = {name: tensor.to("cpu", torch.float64) for name, tensor in exact.tensors.items()}
    for mean, m in {**values, **zero}.items():
        for bias, b in {**zero, **values}.items():
            for placed_mean in placements(m, tuple(gain.shape)):
                for placed_bias in placements(b, tuple(gain.shape)):
                    if float((placed_bias - placed_mean * gain - offset).abs().amax()) <= MATCH * scale:
                        return mean or None, bias or None
    return None, None


def _varies(value: Tensor, axis: int) -> bool:
    return float((value - value.narrow(axis, 0, 1)).abs().amax()) > MATCH * float(value.abs().amax())
