"""Recover eps and its placement by shrinking the input until eps counts."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import isfinite

import torch
from torch import Tensor

from normprobe.norms.fit import Fit
from normprobe.norms.subject import Instance
from normprobe.records.norms import Clamped, EpsPlacement

SPREAD = {torch.float64: 0.01, torch.float32: 0.01, torch.bfloat16: 0.08, torch.float16: 0.08}
FLOOR = {torch.float64: 1e-140, torch.float32: 1e-17, torch.bfloat16: 1e-17, torch.float16: 1e-3}
START = {torch.float64: 256.0, torch.float32: 256.0, torch.bfloat16: 256.0, torch.float16: 8.0}
_LOW, _HIGH = 0.02, 0.97  # shrinkage factors that say something about eps

Shrink = Callable[[float], tuple[float, float]]


@dataclass(frozen=True)
class Eps:
    """A recovered eps. `spread` is the relative range over the scales; `value` None where there is none; `clamps` as in
    `NormSpec`."""

    value: float | None
    placement: EpsPlacement
    note: str
    spread: float = 0.0
    clamps: Clamped | None = None


def shrinkage(instance: Instance, fit: Fit, device: torch.device, seed: int) -> Shrink:
    """A function of the scale that returns (v, r): mean square of the input, output over eps-free output."""
    base = _unit(fit, seed)

    def at(scale: float) -> tuple[float, float]:
        x = (scale * base).to(device=device, dtype=instance.dtype)
        y = fit.layout.split(instance.call(x).to("cpu", torch.float64)) - fit.offset
        part = fit.layout.split(x.to("cpu", torch.float64))
        _, mean_square = fit.layout.statistic(part, fit.centred)
        ideal = fit.gain * fit.ideal(part)
        return float(mean_square.mean()), float((y * ideal).sum() / ideal.square().sum())

    return at


def _unit(fit: Fit, seed: int) -> Tensor:
    """Rows of mean square 1 (deviation, where the norm is centred) in the input's shape, float64."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(fit.layout.shape, generator=generator, dtype=torch.float64, device="cpu")
    part = fit.layout.split(x)
    deviation, mean_square = fit.layout.statistic(part, fit.centred)
    unit = deviation * mean_square.rsqrt()
    if fit.layout.part is None:
        return unit.reshape(fit.layout.shape)
    axis, start, stop = fit.layout.part
    x.narrow(axis, start, stop - start).copy_(unit)
    return x


def recover(shrink: Shrink, dtype: torch.dtype, zero_row_finite: Callable[[], bool]) -> Eps:
    """Recover eps from how the output shrinks with the input, in the units of the mean square or its root.

    With v the mean square of the input and r the output over the output without eps: `inside_sqrt` keeps
    `v(1/r² − 1)` constant over scales, `outside_sqrt` `√v(1/r − 1)`, `clamp` `√v/r` wherever r < 1.

    Args:
        shrink: maps a scale to (v, r).
        dtype: the dtype in which `shrink` runs.
        zero_row_finite: whether a row of zeros has a finite output, asked only where no eps is seen.
    """
    samples = _samples(shrink, START[dtype], FLOOR[dtype])
    if len(samples) < 3:
        if zero_row_finite():
            return Eps(None, "unknown", "no eps seen down to the smallest scale, yet a zero row stays finite")
        return Eps(None, "none", "no eps: shrinking leaves the output as it is, a zero row is not finite")
    forms: dict[EpsPlacement, list[float]] = {
        "inside_sqrt": [v * (1 / r**2 - 1) for v, r in samples],
        "outside_sqrt": [v**0.5 * (1 / r - 1) for v, r in samples],
        "clamp": [v**0.5 / r for v, r in samples],
    }
    spreads = {name: (max(e) - min(e)) / sorted(e)[len(e) // 2] for name, e in forms.items()}
    best = min(spreads, key=lambda name: spreads[name])
    spread, middle = spreads[best], sorted(forms[best])[len(samples) // 2]
    figures = ", ".join(f"{name} {each:.2g}" for name, each in spreads.items())
    if not spread <= SPREAD[dtype]:
        return Eps(None, "unknown", f"eps fits no placement; relative spreads {figures}", spread)
    value = rounded(middle, spread)
    return Eps(value, best, f"eps {value:.4g} {best}; relative spreads {figures}", spread)


def rounded(value: float, spread: float) -> float:
    """The value without the digits that its spread does not support, four digits at most."""
    digits = 4 if spread < 1e-3 else 3 if spread < 1e-2 else 2
    return float(f"{value:.{digits - 1}e}")


def _samples(shrink: Shrink, scale: float, floor: float) -> list[tuple[float, float]]:
    """(v, r) at scales around the one at which the output is halved; empty where eps is not seen."""
    while scale > floor:
        _, r = shrink(scale)
        if not isfinite(r):
            return []
        if r < 0.7:
            break
        scale /= 8
    else:
        return []
    found = [shrink(scale * factor) for factor in (16, 8, 4, 2, 1, 0.5, 0.25, 0.125, 0.0625)]
    return [(v, r) for v, r in found if isfinite(r) and _LOW < r < _HIGH and v > 0]


def as_tensor(eps: Eps, tensors: Mapping[str, Tensor], original: Mapping[str, Tensor]) -> Eps:
    """Where eps is the drawn value of a scalar tensor, the value that the module holds in it instead."""
    for name, tensor in tensors.items():
        if eps.value is None or tensor.numel() != 1:
            continue
        if abs(abs(float(tensor)) - eps.value) <= 2e-3 * eps.value:
            value = rounded(abs(float(original[name])), 0.0)
            told = f"{eps.note}; it is |{name}|, which holds {value:.4g}"
            known = isfinite(value)
            return Eps(value if known else None, eps.placement if known else "unknown", told, eps.spread)
    return eps
