"""Hold a subject against the form `gain · (x - mean) / rms + offset`, at a scale at which eps does not count."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from normprobe.norms.layout import Layout
from normprobe.norms.subject import Instance

LARGE = 2.0**14  # scale of the inputs: an eps of 1e-2 inside the root changes them by 4e-11, outside by 6e-7
TOLERANCE = 1e-3  # of the largest output; float32 inside a module gives 1e-6, another statistic 1e-2 or more


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
    `residual` is the largest deviation over the largest output.
    """

    layout: Layout
    centred: bool
    gain: Tensor
    offset: Tensor
    residual: float


def rows(shape: tuple[int, ...], seed: int) -> Tensor:
    """Two inputs of `shape`, float64: normal around 0.7, and cubed normal around 0.3 (spiky)."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn((2, *shape), generator=generator, dtype=torch.float64)
    x[0] += 0.7
    x[1] = x[1] ** 3 + 0.3
    return x


def odd_parts(instance: Instance, inputs: Tensor, device: torch.device) -> OddParts | None:
    """Split the outputs for `inputs` (K, …) into odd part and offset; None where no offset fits all of them."""
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


def fit(parts: OddParts, layout: Layout, centred: bool) -> Fit | None:
    """The form over `layout` with or without mean, or None where the outputs are not of that form."""
    split = [layout.split(x) for x in parts.inputs]
    forms = [layout.statistic(x, centred) for x in split]
    z = torch.stack([deviation * mean_square.rsqrt() for deviation, mean_square in forms])
    odd = torch.stack([layout.split(u) for u in parts.odd])
    pooled = (0, 1) if len(layout.shape) > 1 else (0,)
    gain = (odd * z).sum(pooled, keepdim=True) / z.square().sum(pooled, keepdim=True)
    residual = float((odd - gain * z).abs().amax() / odd.abs().amax())
    if not residual <= TOLERANCE:
        return None
    return Fit(layout, centred, gain[0], layout.split(parts.even)[:1] if len(layout.shape) > 1 else layout.split(parts.even), residual)
