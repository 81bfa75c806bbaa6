"""Descriptions of recorded calls: the arguments' structure with tensors replaced by their specs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import _disable_current_modes

from normprobe.capture.leaves import replaced

Known = Callable[[Tensor], Tensor | None]

SMALL = 4096  # elements; integer and boolean tensors up to this size are kept by value


@dataclass(frozen=True)
class TensorSpec:
    """Shape, dtype and device of a tensor; `value` is a copy for small integer or boolean tensors, else None."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    value: Tensor | None = field(default=None, compare=False, repr=False)

    @classmethod
    def of(cls, tensor: Tensor, known: Known | None = None) -> TensorSpec:
        """The spec of `tensor`, on any device, meta included; `known` tells the values that it has, or would have."""
        dtype, value = tensor.dtype, None
        if not dtype.is_floating_point and not dtype.is_complex and tensor.numel() <= SMALL:
            held = tensor if known is None else known(tensor)
            if held is not None and not held.is_meta:
                with _disable_current_modes():
                    value = held.detach().clone()
        return cls(tuple(tensor.shape), dtype, tensor.device, value)


@dataclass(frozen=True)
class CallSpec:
    """How a module was called: positional and keyword arguments with every tensor replaced by its `TensorSpec`, and
    which of its results of one shape is meant, counted from 0."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    result: int = 0

    @classmethod
    def of(cls, args: tuple[Any, ...], kwargs: dict[str, Any], known: Known | None = None) -> CallSpec:
        """The spec of a call with these arguments."""
        spec_args, spec_kwargs = replaced((args, kwargs), lambda t: TensorSpec.of(t, known))
        return cls(spec_args, spec_kwargs)

    def tensors(self) -> list[TensorSpec]:
        """All tensor specs, in the order of the arguments."""
        leaves = pytree.tree_leaves((self.args, self.kwargs))
        return [leaf for leaf in leaves if isinstance(leaf, TensorSpec)]
