"""What a norm does to single elements: a sample of what goes in and of what comes out, gain and offset taken off."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from normprobe.measures.padding import sampled
from normprobe.records import NormSite

SAMPLED = 8192  # elements of each execution
_CHANNELS = frozenset({"batchnorm", "groupnorm", "instancenorm"})


@dataclass
class Elementwise:
    """Sampled elements of one norm, over its executions; `gain` and `offset` where they are known."""

    gain: Tensor | None
    offset: Tensor | None
    channels_first: bool
    dtype: str = ""
    total: int = 0
    inputs: list[Tensor] = field(default_factory=list)
    outputs: list[Tensor] = field(default_factory=list)

    @classmethod
    def of(cls, norm: NormSite, tensors: Mapping[str, Tensor]) -> Elementwise:
        """Nothing of `norm` yet; `tensors` are the parameters and buffers of the model."""
        return cls(*_affine(norm, tensors), _channels_first(norm))

    @property
    def count(self) -> int:
        """How many elements there are."""
        return sum(map(len, self.inputs))

    def add(self, x: Tensor, y: Tensor, seed: int, padding: Sequence[Tensor] = ()) -> None:
        """A seeded sample of elements, z = (y − offset) / gain; padding and elements whose gain is 0 are left out."""
        at, total = sampled(x.shape, seed, SAMPLED, padding)
        self.dtype, self.total = str(x.dtype).removeprefix("torch."), self.total + total
        here = at.to(x.device)
        inputs, outputs = (t.detach().reshape(-1)[here].cpu().double() for t in (x, y))
        if self.offset is not None:
            outputs = outputs - _per_element(self.offset, x.shape, self.channels_first)[at]
        if self.gain is not None:
            gain = _per_element(self.gain, x.shape, self.channels_first)[at]
            inputs, outputs = inputs[gain != 0], (outputs / gain)[gain != 0]
        self.inputs.append(inputs)
        self.outputs.append(outputs)


def _per_element(value: Tensor, shape: Sequence[int], channels_first: bool) -> Tensor:
    """A gain or offset for each element of a tensor of this shape."""
    if channels_first and value.numel() > 1:
        value = value.reshape(-1, *[1] * (len(shape) - 2))
    return value.expand(*shape).reshape(-1)


def _channels_first(norm: NormSite) -> bool:
    """Whether its gain lies along axis 1: its kind says so, or features are reduced there and not on the last axis."""
    return norm.kind in _CHANNELS or norm.axes == (1,)


def _affine(norm: NormSite, tensors: Mapping[str, Tensor]) -> tuple[Tensor | None, Tensor | None]:
    """Gain and offset, float64 on the CPU; None where there is none or its form is unknown."""
    if norm.affine in ("none", "other"):
        return None, None
    gain, offset = (
        tensors[name].detach().cpu().double() if name is not None and name in tensors else None
        for name in (norm.weight, norm.bias)
    )
    return gain + 1 if gain is not None and norm.affine.startswith("one_plus") else gain, offset
