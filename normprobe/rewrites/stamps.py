"""Tell whether a tensor still has the values that it had."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class Stamp:
    """A parameter with a digest of its values.

    Attributes:
        version: torch's count of writes; where the dtype has changed since, this alone tells.
        digest: of the bytes; None where there are none to read.
    """

    name: str
    tensor: Tensor
    dtype: torch.dtype
    version: int | None
    digest: bytes | None

    @classmethod
    def of(cls, name: str, tensor: Tensor) -> Stamp:
        """The stamp of `tensor` now."""
        return cls(name, tensor, tensor.dtype, _version(tensor), _digest(tensor))

    def moved(self) -> bool:
        """Whether the values are others now; a cast of the model alone does not count."""
        if self.tensor.dtype is not self.dtype or self.digest is None:
            return _version(self.tensor) != self.version
        return _digest(self.tensor) != self.digest


def stamps(model: nn.Module, names: Iterable[str]) -> Iterator[Stamp]:
    """Stamps of those of the parameters that the model has, tied ones once."""
    named = dict(model.named_parameters(remove_duplicate=False))
    held = {id(named[name]): (name, named[name]) for name in names if name in named}
    return (Stamp.of(name, tensor) for name, tensor in held.values())


def _version(tensor: Tensor) -> int | None:
    return None if tensor.is_inference() else tensor._version


def _digest(tensor: Tensor) -> bytes | None:
    values = tensor.detach()
    if values.is_meta or type(values) is not Tensor or values.layout is not torch.strided:
        return None
    flat = values.contiguous().cpu().reshape(-1).view(torch.uint8)
    return hashlib.blake2b(flat.numpy().data, digest_size=16).digest()
