"""The constants that muP puts into a forward: on what the readout reads, and on queries."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from itertools import pairwise
from typing import Any, ClassVar, final

import torch
from torch import Tensor, nn

from normprobe.rewrites.at_boundary import AtInput
from normprobe.rewrites.swap import Layer, has_layer, lay

Spans = tuple[tuple[int, int], ...]
Pieces = tuple[tuple[int, bool], ...]  # features in a row, and whether they are queries


@final
class DividedInput(AtInput):
    """Multiplies what the readout reads by base width / width, so that its bias is left alone."""

    NOTE, KEY = "its input times base width / width (normprobe)", "_mup_argument"
    HELD: ClassVar[str] = "_mup_held"  # the factor, and what the widths were at the base

    def normprobe_act(self, stream: Tensor) -> Tensor:
        """What is read, scaled, in its own dtype."""
        factor: float = self.__dict__[DividedInput.HELD][0]
        return stream * factor


@final
class ScaledQueries(Layer):
    """Multiplies the queries among the output features of the projection below by a constant."""

    NOTE = "scales queries among its output (normprobe)"
    KEY: ClassVar[str] = "_mup_queries"  # the factor, and the pieces of the output

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """As the module's own forward; its output is (…, features)."""
        output: Tensor = super().forward(*args, **kwargs)
        factor, pieces = self.__dict__[ScaledQueries.KEY]
        return _times(output, factor, pieces)


def without_factor(module: nn.Module, output: Tensor) -> Tensor:
    """What a module gave, without the factor on queries that it may have, which belongs to the scale of attention."""
    if not has_layer(module, ScaledQueries):
        return output
    factor, pieces = module.__dict__[ScaledQueries.KEY]
    return _times(output, 1 / factor, pieces)


def _times(output: Tensor, factor: float, pieces: Pieces) -> Tensor:
    if len(pieces) == 1:
        return output * factor
    parts = torch.split(output, [size for size, _ in pieces], -1)
    return torch.cat([p * factor if scaled else p for p, (_, scaled) in zip(parts, pieces, strict=True)], -1)


def divide_input(module: nn.Module, path: str, factor: float, held: Any, name: str, undo: ExitStack) -> None:
    """Multiply the first argument, called `name`, of the readout at `path`; `held` is what the layer remembers."""
    for key, value in ((DividedInput.HELD, (factor, held)), (DividedInput.KEY, (0, name))):
        undo.callback(module.__dict__.pop, key, None)
        module.__dict__[key] = value
    lay(module, DividedInput, path, undo)


def scale_queries(module: nn.Module, path: str, factor: float, pieces: Pieces, undo: ExitStack) -> None:
    """Multiply the pieces of the output of the projection at `path` that are queries."""
    undo.callback(module.__dict__.pop, ScaledQueries.KEY, None)
    module.__dict__[ScaledQueries.KEY] = (factor, pieces)
    lay(module, ScaledQueries, path, undo)


def pieces_of(queries: Spans, others: Sequence[Spans], size: int) -> Pieces:
    """An output of `size` features cut where queries, and others such as keys, begin and end."""
    whole = [_joined(spans) for spans in (queries, *others)]
    ends = {0, size, *(end for spans in whole for span in spans for end in span)}
    return tuple(
        (stop - start, any(first <= start and stop <= last for first, last in whole[0]))
        for start, stop in pairwise(sorted(ends))
    )


def _joined(spans: Spans) -> Spans:
    """The same features in order, ranges that touch or overlap as one."""
    found: list[tuple[int, int]] = []
    for start, stop in sorted(set(spans)):
        if found and start <= found[-1][1]:
            found[-1] = (found[-1][0], max(stop, found[-1][1]))
        else:
            found.append((start, stop))
    return tuple(found)
