"""How much a product with a weight gains: mean squares of what goes in and what comes out, as it runs."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from normprobe.capture.watch import Handler
from normprobe.records import Anatomy, OpSite, WeightSite

SAMPLE = 1 << 14  # entries of each tensor that are looked at
_OPERANDS = (("mat1", "mat2"), ("batch1", "batch2"), ("self", "mat2"), ("input", "weight"))


class ProductHandler(Handler):
    """Keeps E[y²] / E[x²] of one product or convolution.

    Over every entry, or where there are more than 2^14 over slices of all axes but that of the features, evenly
    spaced; biases and padding are included.
    """

    def __init__(self, site: WeightSite, weight: Tensor) -> None:
        self._features = 1 if site.kind == "conv" else -1
        self._weight = weight.data_ptr()
        self._ratio: Tensor | None = None

    def after(self, arguments: Mapping[str, Any], output: Any) -> None:
        """Take both mean squares; they stay on the device of the model."""
        names = next(names for names in _OPERANDS if names[0] in arguments and names[1] in arguments)
        first, second = (arguments[name] for name in names)
        signal = second if first.untyped_storage().data_ptr() == self._weight else first
        self._ratio = self._mean_square(output) / self._mean_square(signal)

    def gain(self) -> float | None:
        """The ratio; None where the product was not seen, or nothing but zeros came in."""
        ratio = math.nan if self._ratio is None else float(self._ratio)
        return ratio if math.isfinite(ratio) else None

    def _mean_square(self, x: Tensor) -> Tensor:
        some = x.detach()
        features = self._features % some.dim()
        while some.numel() > SAMPLE:
            sizes = [0 if axis == features else size for axis, size in enumerate(some.shape)]
            axis = sizes.index(max(sizes))
            step = min(-(-some.numel() // SAMPLE), sizes[axis])
            if step < 2:
                break
            some = some[(slice(None),) * axis + (slice(None, None, step),)]
        found: Tensor = torch.linalg.vector_norm(some, dtype=torch.promote_types(some.dtype, torch.float32))
        return found.square() / some.numel()


def product_handlers(
    model: nn.Module, anatomy: Anatomy, taken: Mapping[OpSite, Handler]
) -> Iterator[tuple[WeightSite, ProductHandler]]:
    """A handler for the first use of every weight but lookups; an operation that is `taken` is left alone."""
    parameters = dict(model.named_parameters())
    for site in anatomy.weights:
        weight = parameters.get(site.parameter)
        if site.kind != "embedding" and site.site not in taken and weight is not None:
            yield site, ProductHandler(site, weight)
