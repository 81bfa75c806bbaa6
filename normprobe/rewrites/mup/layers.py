"""The constants that muP puts into a forward: on what the readout reads, and on queries."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, final

from torch import Tensor, nn

from normprobe.rewrites.at_boundary import AtInput
from normprobe.rewrites.swap import Layer, has_layer, lay


@dataclass(frozen=True)
class Base:
    """Where a model was carried from: features that the readout reads there, features of a head, seed of the values."""

    width: int
    head_dim: int | None
    seed: int


@final
class DividedInput(AtInput):
    """Multiplies what the readout reads by base width / width, so that its bias is left alone."""

    NOTE, KEY = "its input times base width / width (normprobe)", "_mup_argument"
    HELD: ClassVar[str] = "_mup_held"  # the factor, and the base

    def normprobe_act(self, stream: Tensor) -> Tensor:
        """What is read, scaled, in its own dtype."""
        factor: float = self.__dict__[DividedInput.HELD][0]
        return stream * factor


@final
class ScaledQueries(Layer):
    """Multiplies the queries among the output features of the projection below by a constant."""

    NOTE = "scales queries among its output (normprobe)"
    KEY: ClassVar[str] = "_mup_queries"  # a buffer that is not saved: the factor of each feature, or the one of all

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """As the module's own forward; its output is (…, features)."""
        output: Tensor = super().forward(*args, **kwargs)
        return output * self.get_buffer(ScaledQueries.KEY).to(output.dtype)


def without_factor(module: nn.Module, output: Tensor) -> Tensor:
    """What a module gave, without the factor on queries that it may have, which belongs to the scale of attention."""
    return output / module.get_buffer(ScaledQueries.KEY) if has_layer(module, ScaledQueries) else output


def divide_input(module: nn.Module, path: str, factor: float, base: Base, name: str) -> None:
    """Multiply the first argument, called `name`, of the readout at `path`; the layer remembers the base."""
    for key, value in ((DividedInput.HELD, (factor, base)), (DividedInput.KEY, (0, name))):
        module.__dict__[key] = value
    lay(module, DividedInput, path)


def scale_queries(module: nn.Module, path: str, factors: Tensor) -> None:
    """Multiply the output features of the projection at `path` by these numbers."""
    module.register_buffer(ScaledQueries.KEY, factors, persistent=False)
    lay(module, ScaledQueries, path)
