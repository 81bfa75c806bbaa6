"""What the identification works on: something that can be rebuilt in any dtype with drawn parameters."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

_SCALARS = 32  # scalars up to which their magnitudes are kept apart


class NotComparableError(Exception):
    """The output holds no single floating tensor that corresponds to the input, so no norm can be meant."""


@dataclass(frozen=True)
class Instance:
    """One fresh copy: a function of the varied input, and the tensors that it uses.

    Attributes:
        call: maps x (the subject's shape and device, `dtype`) to y of the same shape; leaves x as it is.
            Raises `NotComparableError` where the output holds no such tensor.
        tensors: floating parameters and buffers by name; writing into one changes what `call` computes.
        parameters: which of those names are parameters.
        dtype: dtype of the input, and of `tensors` where the subject allows it.
    """

    call: Callable[[Tensor], Tensor]
    tensors: dict[str, Tensor]
    parameters: frozenset[str]
    dtype: torch.dtype


class Subject(Protocol):
    """A module, or a piece of a recorded graph, whose behaviour is to be identified."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the varied input; the first axis holds rows, at least two where that is possible."""
        ...

    @property
    def recorded_shape(self) -> tuple[int, ...]:
        """Shape of that input in the recorded call; axes that differ from `shape` were shortened."""
        ...

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the varied input in the recorded call."""
        ...

    @property
    def device(self) -> torch.device:
        """Device on which instances run."""
        ...

    def instance(self, dtype: torch.dtype, seed: int | None, train: bool = False) -> Instance:
        """A fresh copy in `dtype`; with a seed every tensor is replaced by `draw`, else values are kept."""
        ...


def draw(named: Iterable[tuple[str, Tensor]], parameters: frozenset[str], seed: int) -> dict[str, Tensor]:
    """Random values for named tensors, in float64 on the CPU, the same for every dtype.

    Values are odd multiples of 1/128 with magnitude in (0.5, 1.5), so that float16 and bfloat16 hold them
    exactly and none is 1. Parameters get either sign, a negative one at least 1/4 away from -1, so that
    neither w nor 1 + w is small; buffers are positive (a variance must be). Scalars differ in magnitude.

    Args:
        named: names and tensors, of which only the shapes are used.
        parameters: names of the parameters among them.
        seed: seed of a generator of its own; the process's random state is not touched.
    """
    generator = torch.Generator().manual_seed(seed)
    values: dict[str, Tensor] = {}
    scalars: set[float] = set()
    for name, tensor in named:
        value = _value(tuple(tensor.shape), name in parameters, generator)
        while value.numel() == 1 and abs(float(value)) in scalars and len(scalars) < _SCALARS:
            value = _value(tuple(tensor.shape), name in parameters, generator)
        if value.numel() == 1:
            scalars.add(abs(float(value)))
        values[name] = value
    return values


def _value(shape: tuple[int, ...], signed: bool, generator: torch.Generator) -> Tensor:
    numerator = torch.randint(32, 96, shape, generator=generator, device="cpu").mul_(2).add_(1)
    if signed:
        inner = torch.randint(32, 48, shape, generator=generator, device="cpu").mul_(2).add_(1)
        negative = -torch.where(numerator > 128, inner + 96, inner)
        numerator = torch.where(torch.rand(shape, generator=generator, device="cpu") < 0.5, numerator, negative)
    return numerator.double() / 128
