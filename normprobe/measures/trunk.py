"""What the adds of one residual stream share: which tokens count, and the state that was written last.

Dims: B batch, S tokens of a sample, N = B·S tokens, C features.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from normprobe.measures.padding import fitting
from normprobe.measures.tokens import as_tokens, norms

SAMPLE = 32  # tokens behind the sampled numbers


class Tokens(NamedTuple):
    """Which tokens of a state count, as flat indices.

    Attributes:
        kept: those that count; None: all.
        first: the first that counts of every sample that has one; `rest`: all others that count.
        sample: a seeded sample of those that count.
        weights: 1 for a token that counts, else 0, [N].
    """

    kept: Tensor | None
    first: Tensor
    rest: Tensor
    sample: Tensor
    weights: Tensor

    @property
    def number(self) -> int:
        """How many count."""
        return len(self.first) + len(self.rest)

    def counted(self, values_N: Tensor) -> Tensor:
        """The values [..., N] of the tokens that count."""
        return values_N if self.kept is None else values_N[..., self.kept]

    @classmethod
    def of(cls, x_BSC: Tensor, padding: Tensor | None, seed: int) -> Tokens:
        """The tokens of a state; `padding` is True for those to leave out, [N]."""
        batch, tokens = x_BSC.shape[:2]
        counted = torch.ones(batch * tokens, dtype=torch.bool, device=x_BSC.device)
        if padding is not None:
            counted &= ~padding.to(x_BSC.device)
        kept = counted.nonzero().flatten()
        generator = torch.Generator().manual_seed(seed)
        drawn = torch.randperm(len(kept), generator=generator, device="cpu")[:SAMPLE].sort().values
        samples = counted.view(batch, tokens)
        first = samples.byte().argmax(-1) + torch.arange(batch, device=x_BSC.device) * tokens
        first = first[samples.any(-1)]
        rest = counted.index_fill(0, first, False).nonzero().flatten()
        weights = counted.to(torch.float64 if x_BSC.dtype is torch.float64 else torch.float32)
        return cls(None if len(kept) == len(counted) else kept, first, rest, kept[drawn.to(kept.device)], weights)

    def on(self, device: torch.device) -> Tokens:
        """The same tokens, for states on another device."""
        return Tokens(None if self.kept is None else self.kept.to(device), *(each.to(device) for each in self[1:]))


@dataclass
class Trunk:
    """What the adds of one stream share: which tokens count, and the norms of the state that was written last.

    Attributes:
        axis: the feature axis.
        padding: masks [B, S], True for tokens that are left out; the one that fits a state counts.
        seed: of the sample of tokens.
    """

    axis: int
    padding: Sequence[Tensor] = ()
    seed: int = 0
    _last: tuple[weakref.ref[Tensor], int, Tensor] | None = None
    _counted: dict[tuple[int, int], dict[torch.device, Tokens]] = field(default_factory=dict)

    def states(self, x: Tensor) -> Tensor:
        """`x` as [B, S, C].

        Raises:
            ValueError: if `x` has no such axis or is no floating point tensor.
        """
        if x.dim() <= max(self.axis, 0) or not x.is_floating_point():
            raise ValueError(
                f"expected floating point features on axis {self.axis}, found {x.dtype} of shape {tuple(x.shape)}"
            )
        return as_tokens(x, self.axis)

    def tokens(self, x_BSC: Tensor) -> Tokens:
        """The tokens of a state that count; all where no padding has its shape."""
        shape = (x_BSC.shape[0], x_BSC.shape[1])
        on = self._counted.setdefault(shape, {})
        if not on:
            padding = fitting(self.padding, shape)
            on[x_BSC.device] = Tokens.of(x_BSC, None if padding is None else padding.flatten(), self.seed)
        if x_BSC.device not in on:
            on[x_BSC.device] = next(iter(on.values())).on(x_BSC.device)
        return on[x_BSC.device]

    def norms(self, x: Tensor) -> Tensor:
        """L2 norm of every token of `x`, [N]; those of the state that was written last are known."""
        if self._last is not None and self._last[0]() is x and self._last[1] == _version(x):
            return self._last[2]
        return norms(self.states(x))

    def wrote(self, x: Tensor, norms_N: Tensor) -> None:
        """Keep the norms of a state while it lives, where a change of it will show; the tensor itself is not kept."""
        version = _version(x)
        self._last = None if version is None else (weakref.ref(x), version, norms_N)


def _version(x: Tensor) -> int | None:
    """How often `x` was written in place; None where torch does not count, as of tensors of inference mode."""
    return None if x.is_inference() else x._version
