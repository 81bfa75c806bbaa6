"""Hold a subject against the form `gain · (x - mean) / rms + offset`, at a scale where eps does not count."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from normprobe.norms.layout import Layout
from normprobe.norms.subject import Instance, Subject

LARGE = 2.0**14  # scale of the inputs: an eps of 1e-2 inside the root changes them by 4e-11, outside by 6e-7
TOLERANCE = 1e-3  # of the largest output; float32 inside a module gives 1e-6, another statistic 1e-2 or more
PRECISE = 1e-5  # residual above which an eps that does not fade with scale is looked for


@dataclass(frozen=True)
class OddParts:
    """Outputs for several inputs, split into the part that is odd in the input and the rest.

    `inputs` and `odd` stack K inputs of the subject's shape, float64; `even` has one such slice, the offset.
    """

    inputs: Tensor
    odd: Tensor
    even: Tensor


@dataclass(frozen=True)
class Fit:
    """A form that holds: `output = gain · z + offset`, z of mean square 1 over the layout's axes.

    `gain` and `offset` are float64 in the layout's view with the first axis of size 1 (rows share them).
    `residual` is the largest deviation over the largest output. `scaled` is the share of the row's largest
    square that is added to the mean square, where one is.
    """

    layout: Layout
    centred: bool
    gain: Tensor
    offset: Tensor
    residual: float
    scaled: float | None = None

    def ideal(self, x: Tensor) -> Tensor:
        """z of x, both in the layout's view, without eps."""
        return ideal(self.layout, self.centred, self.scaled, x)


def rows(shape: tuple[int, ...], seed: int) -> Tensor:
    """Two inputs of `shape`, float64: normal around 0.7, and cubed normal around 0.3 (spiky)."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn((2, *shape), generator=generator, dtype=torch.float64, device="cpu")
    x[0] += 0.7
    x[1] = x[1] ** 3 + 0.3
    return x


def odd_parts(instance: Instance, inputs: Tensor, device: torch.device) -> OddParts | None:
    """Split the outputs for `inputs` (K, …) into odd part and offset; None where no offset fits them all."""
    plus, minus = evaluate(instance, inputs, device), evaluate(instance, -inputs, device)
    odd, even = (plus - minus) / 2, (plus + minus) / 2
    offset = even.mean(0)
    if offset.ndim > 1:
        offset = offset.mean(0, keepdim=True).expand_as(offset)
    largest = float(odd.abs().amax())
    if not largest > 0 or not float((even - offset).abs().amax()) <= TOLERANCE * largest:
        return None
    return OddParts(inputs, odd, offset)


def evaluate(instance: Instance, inputs: Tensor, device: torch.device) -> Tensor:
    """The instance's outputs for each of the stacked inputs, in float64 on the CPU."""
    sent = inputs.to(device=device, dtype=instance.dtype)
    return torch.stack([instance.call(x).to("cpu", torch.float64) for x in sent])


def fit(parts: OddParts, layout: Layout, centred: bool, scaled: float | None = None) -> Fit | None:
    """The form over `layout` with or without mean, or None where the outputs are not of that form.

    Args:
        parts: outputs at a scale at which eps does not count.
        layout: which elements share a statistic.
        centred: whether the mean is subtracted.
        scaled: share of the largest square that is added to the mean square, None where nothing is added.
    """
    z = torch.stack([ideal(layout, centred, scaled, layout.split(x)) for x in parts.inputs])
    odd = torch.stack([layout.split(u) for u in parts.odd])
    pooled = (0, 1) if len(layout.shape) > 1 else (0,)
    gain = (odd * z).sum(pooled, keepdim=True) / z.square().sum(pooled, keepdim=True)
    residual = float((odd - gain * z).abs().amax() / odd.abs().amax())
    if not residual <= TOLERANCE:
        return None
    offset = layout.split(parts.even)
    return Fit(layout, centred, gain[0], offset[:1] if len(layout.shape) > 1 else offset, residual, scaled)


def fit_scaled(parts: OddParts, layout: Layout, centred: bool) -> Fit | None:
    """The form whose mean square has a share of the row's largest square added to it, at every scale.

    The share follows from one element in two inputs, in whose ratio the gain drops out.
    """
    one, two = (layout.split(x) for x in parts.inputs[:2])
    first, second = (layout.statistic(x, centred) for x in (one, two))
    peaks = [d.square().amax(layout.reduced, keepdim=True) for d, _ in (first, second)]
    ratio = (layout.split(parts.odd[0]) * second[0] / (layout.split(parts.odd[1]) * first[0])).square()
    shares = (ratio * first[1] - second[1]) / (peaks[1] - ratio * peaks[0])
    share = float(shares.median())
    found = fit(parts, layout, centred, share) if 0 < share < 1 else None
    return found if found is not None and found.residual <= PRECISE else None


def ideal(layout: Layout, centred: bool, scaled: float | None, x: Tensor) -> Tensor:
    """z of x, both in the layout's view: the deviation over the root of the mean square."""
    deviation, square = layout.statistic(x, centred)
    if scaled is not None:
        square = square + scaled * deviation.square().amax(layout.reduced, keepdim=True)
    return deviation * square.rsqrt()


def linear_form(instance: Instance, subject: Subject) -> tuple[Tensor, Tensor] | None:
    """Gain and offset of a map that is linear in each input alone, rows pooled; None where it is not."""
    parts = odd_parts(instance, rows(subject.shape, 5), subject.device)
    if parts is None:
        return None
    several = parts.even.ndim > 1
    pooled = (0, 1) if several else (0,)
    weight = parts.inputs.square().sum(pooled, keepdim=True)
    gain = (parts.odd * parts.inputs).sum(pooled, keepdim=True) / weight
    error = float((parts.odd - gain * parts.inputs).abs().amax() / parts.odd.abs().amax())
    return (gain[0], parts.even[:1] if several else parts.even) if error <= PRECISE else None
