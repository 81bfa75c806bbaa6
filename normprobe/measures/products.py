"""How much a product with a weight gains: mean squares of what goes in and what comes out, as it runs."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar

from torch import Tensor

from normprobe import stats
from normprobe.capture.watch import Handler, Watched, watch
from normprobe.measures.extra import Extra, Subject
from normprobe.measures.padding import counted, padding_masks
from normprobe.records import Basis, OpSite, Skipped, WeightSite
from normprobe.records.extras import ExtraName
from normprobe.records.products import ProductGain, ProductsMeasure

SAMPLE = 1 << 14  # entries of each tensor that are looked at
_NONE = "no product or convolution with a weight was seen as an operation of its own; a kernel may hold some inside"
_OPERANDS = (("mat1", "mat2"), ("batch1", "batch2"), ("self", "mat2"), ("input", "weight"))


class Products(Extra):
    """Second moments across every product with a weight: E[y²] / E[x²] (He et al. 2015, sec. 2.2), in one forward."""

    name: ClassVar[ExtraName] = "products"

    def measure(self, subject: Subject) -> tuple[ProductsMeasure | None, tuple[Skipped, ...]]:
        """Every weight of the Anatomy but lookups, at its first use; padding is left out where the rows are tokens."""
        handlers = {site: handler for site, handler in product_handlers(subject)}
        if not handlers:
            return None, (Skipped(what=self.name, why=_NONE),)
        watched = watch(
            subject.model,
            subject.inputs,
            {site.site: handler for site, handler in handlers.items()},
            everywhere=subject.everywhere,
        )
        found = tuple(product for site, handler in handlers.items() if (product := handler.product(site)) is not None)
        seen = {product.parameter for product in found}
        skipped = tuple(_skip(site, handlers[site], watched) for site in handlers if site.parameter not in seen)
        if not found:
            return None, skipped
        logs = [math.log(product.gain) for product in found if product.gain > 0]
        overall = math.exp(math.fsum(logs) / len(logs)) if len(logs) == len(found) else 0.0
        return ProductsMeasure(products=found, overall=overall), skipped


def _skip(site: WeightSite, handler: ProductHandler, watched: Watched) -> Skipped:
    return Skipped(what=f"product with {site.parameter}", why=watched.reason(site.site) or handler.flaw)


class ProductHandler(Handler):
    """Keeps E[y²] / E[x²] of one product or convolution, y without what the operation adds to the product.

    Over every entry, or where there are more than 2^14 over slices of all axes but that of the features, evenly
    spaced; the padding of convolutions is included. Biases are not: whether the operation adds one depends on the
    layout of its input.
    """

    def __init__(self, site: WeightSite, padding: Sequence[Tensor] = ()) -> None:
        self._padding = padding
        self._features = 1 if site.kind == "conv" else -1
        self._signal = 1 - site.operand
        self._added: Tensor | None = None
        self._sizes: tuple[Tensor, Tensor] | None = None  # RMS of x and of y: no square of theirs overflows
        self._basis: Basis | None = None

    def before(self, arguments: Mapping[str, Any]) -> None:
        """Keep what will be added; a sum in place writes over it."""
        operands = factor_names(arguments)
        if operands[0] in ("mat1", "batch1"):
            self._added = arguments["self"] * arguments.get("beta", 1)
        elif (bias := arguments.get("bias")) is not None:
            self._added = bias.reshape(-1, *[1] * (arguments["weight"].dim() - 2))

    def after(self, arguments: Mapping[str, Any], output: Any) -> None:
        """Take the RMS of both; they stay on the device of the model."""
        signal = arguments[factor_names(arguments)[self._signal]]
        some, added, self._added = self._some(output), self._added, None
        product = some if added is None else stats.widen(some) - self._some(added.expand_as(output))
        product = self._counted(product, output)
        before = self._counted(self._some(signal), signal)
        if before.numel() and product.numel():
            self._sizes = _rms(before), _rms(product)
        dtype, whole = str(output.dtype).removeprefix("torch."), some.numel() == output.numel()
        self._basis = Basis(unit="1", dtype=dtype, count=product.numel(), exact=whole)

    @property
    def flaw(self) -> str:
        """Why `product` is None, though the operation was seen."""
        if self._sizes is None:
            return "nothing but padding, or no entry at all, went in"
        zeros = float(self._sizes[0]) == 0
        return "what went in was 0" if zeros else "a value of what went in or came out was not finite"

    def product(self, site: WeightSite) -> ProductGain | None:
        """What was seen; None where the product was not, nothing or nothing but zeros came in, or a value was not
        finite."""
        if self._basis is None or self._sizes is None:
            return None
        before, after = (float(size) for size in self._sizes)
        if before == 0 or not (math.isfinite(before) and math.isfinite(after)):
            return None
        gain = (after / before) * (after / before)
        return ProductGain(parameter=site.parameter, roles=site.roles, gain=gain, basis=self._basis)

    def _some(self, x: Tensor) -> Tensor:
        some = x.detach()
        features = self._features % some.dim()
        while some.numel() > SAMPLE:
            sizes = [0 if axis == features else size for axis, size in enumerate(some.shape)]
            axis = sizes.index(max(sizes))
            step = min(-(-some.numel() // SAMPLE), sizes[axis])
            if step < 2:
                break
            some = some[(slice(None),) * axis + (slice(None, None, step),)]
        return some

    def _counted(self, some: Tensor, x: Tensor) -> Tensor:
        """Those of `some` entries of `x` that are no padding."""
        seen = counted(self._padding, x.shape)
        return some if seen is None else some[self._some(seen.to(x.device).expand_as(x))]


def factor_names(arguments: Mapping[str, Any]) -> tuple[str, str]:
    """The names of the two factors."""
    return next(names for names in _OPERANDS if names[0] in arguments and names[1] in arguments)


def _rms(some: Tensor) -> Tensor:
    return stats.token_rms(some.flatten())


def product_handlers(subject: Subject) -> Iterator[tuple[WeightSite, ProductHandler]]:
    """A handler for the first use of every weight but lookups; of weights that run together, for the first."""
    padding, taken = padding_masks(subject.inputs), set[OpSite]()
    for site in subject.anatomy.weights:
        if site.kind != "embedding" and site.site not in taken:
            taken.add(site.site)
            yield site, ProductHandler(site, padding)
