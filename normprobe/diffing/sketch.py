"""A small stand-in for a large tensor, from which the distance of two tensors is told; every element is in it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

BUCKETS = 4093  # a prime, so that no channel of a tensor falls into few buckets
_ROWS = 512  # rows of buckets that are summed at once: 16 MiB in float64


@dataclass(frozen=True)
class Sketch:
    """What is kept of one tensor.

    Attributes:
        values: all elements, or where there are more of them sums with random signs, float64 on the CPU.
        size: ‖x‖ over all elements.
        shape: of the tensor as it was arranged, axes of one element left out.
        count: elements.
        dtype: of the tensor.
    """

    values: Tensor
    size: float
    shape: tuple[int, ...]
    count: int
    dtype: str

    @property
    def exact(self) -> bool:
        """Whether every element is kept as it was."""
        return self.count <= BUCKETS

    @property
    def rms(self) -> float:
        """Root mean square of all elements."""
        return self.size / math.sqrt(self.count) if self.count else math.nan

    @property
    def finite(self) -> bool:
        """Whether every element is finite."""
        return math.isfinite(self.size)

    def times(self, factor: float) -> Sketch:
        """The sketch of `factor` times the tensor."""
        return Sketch(self.values * factor, abs(factor) * self.size, self.shape, self.count, self.dtype)


class Sketcher:
    """Makes sketches that can be compared with each other.

    A tensor x of n > K elements is kept as K sums s_k = Σ σ_i x_i over the i with i mod K = k, with random signs σ
    that are the same for every tensor of n elements. The square of ‖s(x) − s(y)‖ has the mean ‖x − y‖² and a
    relative standard deviation near √(2/K), 2 % (a count sketch: Charikar, Chen and Farach-Colton 2002).

    Args:
        seed: of the signs.
    """

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self._signs: tuple[int, Tensor] = (0, torch.empty(0))

    def __call__(self, x: Tensor) -> Sketch:
        """The sketch of `x`, as it is arranged."""
        flat, count = x.detach().reshape(-1), x.numel()
        shape, dtype = bare(x.shape), str(x.dtype).removeprefix("torch.")
        if count <= BUCKETS:
            values = flat.to(device="cpu", dtype=torch.float64)
            return Sketch(values, float(values.square().sum().sqrt()), shape, count, dtype)
        sums, squares = torch.zeros(BUCKETS, dtype=torch.float64), 0.0
        signs, step = self._signs_of(count), BUCKETS * _ROWS
        for start in range(0, count, step):
            part = flat[start : start + step].to(device="cpu", dtype=torch.float64)
            squares += float(part.square().sum())
            part = part * signs[start : start + step]
            rest = -len(part) % BUCKETS
            sums += torch.nn.functional.pad(part, (0, rest)).view(-1, BUCKETS).sum(0)
        return Sketch(sums, math.sqrt(squares) if squares >= 0 else math.nan, shape, count, dtype)

    def _signs_of(self, count: int) -> Tensor:
        """The signs of tensors of `count` elements; the last ones are kept, as most tensors are of one size."""
        if self._signs[0] != count:
            generator = torch.Generator().manual_seed(self.seed)
            drawn = torch.randint(0, 2, (count,), generator=generator, dtype=torch.int8)
            self._signs = count, drawn * 2 - 1
        return self._signs[1]


def bare(shape: Sequence[int]) -> tuple[int, ...]:
    """A shape without its axes of one element."""
    return tuple(size for size in shape if size != 1)


def arranged(x: Tensor, shape: tuple[int, ...]) -> Tensor | None:
    """`x` with its axes in the order of `shape`, which has no axes of one element; None where it does not fit.

    Axes may be permuted (channels first or last, sequence or batch first) or merged before the last one (B·S, C);
    axes of equal size keep their order.
    """
    own = x.reshape(bare(x.shape))
    if own.shape == shape:
        return own
    if sorted(own.shape) == sorted(shape):
        left = list(range(own.dim()))
        order = []
        for size in shape:
            axis = next(axis for axis in left if own.shape[axis] == size)
            left.remove(axis)
            order.append(axis)
        return own.permute(order)
    fits = x.numel() == math.prod(shape) and shape and own.dim() and own.shape[-1] == shape[-1]
    return own.reshape(shape) if fits else None


def error(a: Sketch, b: Sketch) -> float:
    """‖b − a‖ / max(‖a‖, ‖b‖); NaN where neither is finite, infinite where one is not."""
    if not a.finite or not b.finite:
        return math.nan if a.finite == b.finite else math.inf
    largest = max(a.size, b.size)
    return float((b.values - a.values).square().sum().sqrt()) / largest if largest else 0.0


def cosine(a: Sketch, b: Sketch) -> float:
    """⟨a, b⟩ / (‖a‖ ‖b‖) between −1 and 1; NaN where one is zero or not finite."""
    sizes = float(a.values.norm() * b.values.norm())
    if not math.isfinite(sizes) or sizes == 0:
        return math.nan
    return max(-1.0, min(1.0, float((a.values * b.values).sum()) / sizes))
