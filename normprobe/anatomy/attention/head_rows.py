"""Which rows of which weight feed each head: index tensors are sent through the recorded views."""

from __future__ import annotations

import math
from collections.abc import Container, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from normprobe.anatomy.attention.sides import Side
from normprobe.anatomy.flow.ops import base
from normprobe.anatomy.flow.replay import ABSENT, Moves, condensed, sent, signature
from normprobe.anatomy.flow.steps import Flow, Step
from normprobe.capture.trace import Node
from normprobe.records import HeadRows

_TOKENS = 512  # tokens of which each head's rows are looked at

Shape = tuple[int, ...]
Ranges = tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Rows:
    """The rows of one parameter behind an operand: `places` has for each of its vectors, by its leading axes and
    tokens, the number of the set of rows behind it; `sets` are those sets, in the order of their first vectors."""

    parameter: str
    axis: int
    places: Tensor
    sets: tuple[Ranges, ...]

    def at(self, query: Rows | None) -> HeadRows:
        """The rows of each head of a query that runs over as many leading places; else of each of the own heads."""
        sets = self.sets
        own = self._firsts()
        heads = query._firsts() if query is not None else []
        if query is not None and len(own) == len(heads):
            first = {head: i for i, head in reversed(list(enumerate(heads)))}
            if len(first) == len(query.sets):
                sets = tuple(self.sets[own[first[i]]] for i in range(len(first)))
        return HeadRows(parameter=self.parameter, axis=self.axis, heads=sets)

    def varied(self) -> int:
        """The number of places along those leading axes on which the rows differ."""
        first = self.places[..., 0]
        differ = [bool((first.diff(dim=i) != 0).any()) for i in range(first.dim())]
        return math.prod(size for size, some in zip(first.shape, differ, strict=True) if some)

    def _firsts(self) -> list[int]:
        """The set of rows behind the first token of every leading place."""
        numbers: list[int] = self.places.flatten(0, -2)[:, 0].tolist()
        return numbers


def head_rows(flow: Flow, value: int, side: Side, features: int) -> Rows | str:
    """The rows of the projection's weight behind the attention operand `value`, whose features are its axis
    `features` (−1 or −2); or the reason why they cannot be told. Sites that are built alike share one answer."""
    if side.projection is None:
        return "they come from no single product with a weight"
    moves = [(step.node, place) for step, place in reversed(side.moves)]
    output = flow.shape(side.projection.outputs[0])
    channels = 1 if base(side.projection.node.op) == "aten.convolution" else len(output) - 1
    for name, size, views in _weights(flow, side.projection, output[channels]):
        key = ("head rows", size, signature(flow, views), output, signature(flow, moves), flow.shape(value), features)
        if key not in flow.memo:
            flow.memo[key] = _read(flow, size, views, (output, channels), moves, (flow.shape(value), features))
        if flow.memo[key] is not None:
            return Rows(name, *flow.memo[key])
    return "more than a move of elements lies between their weight and the attention"


def _read(
    flow: Flow, size: Shape, views: Moves, made: tuple[Shape, int], moves: Moves, operand: tuple[Shape, int]
) -> tuple[int, Tensor, tuple[Ranges, ...]] | None:
    """The axis of output features in a parameter of shape `size`, and the rows on it behind each vector."""
    output, channels = made
    features = _features(flow, size, views, output[channels])
    if features is None:
        return None
    axis, rows = features
    index = sent(flow, moves, rows.view(-1, *(1 for _ in output[channels + 1 :])).expand(output))
    if index is None or index.shape != operand[0] or index.dim() < 3:
        return None
    return axis, *_sets(index.movedim(operand[1], -1))


def _sets(vectors: Tensor) -> tuple[Tensor, tuple[Ranges, ...]]:
    """Numbers of the distinct vectors, at most some hundred tokens of each place, and what those are as ranges."""
    some = vectors[..., :_TOKENS, :]
    told = some[..., :1, :] if bool((some == some[..., :1, :]).all()) else some  # mostly all tokens are alike
    distinct, places = torch.unique(told.flatten(0, -2), dim=0, return_inverse=True)
    first = torch.full((len(distinct),), len(places)).scatter_reduce(0, places, torch.arange(len(places)), "amin")
    order = first.argsort()
    found = tuple(_ranges(sorted({*distinct[i].tolist()} - {ABSENT})) for i in order)
    return order.argsort()[places].view(told.shape[:-1]).expand(some.shape[:-1]), found


def _features(flow: Flow, size: Shape, views: Moves, width: int) -> tuple[int, Tensor] | None:
    """Row and column numbers of the parameter are sent through the views; the one that changes along the output's
    features is the axis, and says which row is behind each feature."""
    if len(size) > 2:  # a kernel: its first axis is that of the channels that it makes
        return (0, torch.arange(width)) if size[0] == width and not views else None
    for axis, numbers in enumerate(torch.meshgrid(*(torch.arange(n) for n in size), indexing="ij")):
        moved = sent(flow, views, numbers)
        if moved is None:
            continue
        row = condensed(moved, moved.dim() - 1).reshape(-1, width)
        others = row[[0, len(row) // 2, -1]]  # views move whole axes: three rows stand for all
        if bool((others == others[:1]).all()):
            return axis, row[0]
    return None


def _ranges(rows: list[int]) -> Ranges:
    """Sorted row numbers as half-open ranges."""
    found: list[tuple[int, int]] = []
    for row in rows:
        if found and found[-1][1] == row:
            found[-1] = (found[-1][0], row + 1)
        else:
            found.append((row, row + 1))
    return tuple(found)


def _weights(flow: Flow, projection: Step, width: int) -> Iterator[tuple[str, Shape, Moves]]:
    """Parameters behind a projection to `width` features: name, shape, and the views between it and the product."""
    kernel = base(projection.node.op) == "aten.convolution"
    if kernel and (projection.node.args[-1] != 1 or projection.node.args[6]):
        return  # in groups, or transposed
    for value in projection.statics:
        shape = flow.trace.values[value].shape
        rank = range(3, 6) if kernel else (2, 3)  # three axes where the weight is repeated for a batch
        if len(shape) in rank and shape[0 if kernel else -1] == width:
            found = _views(flow, value, rank if kernel else (2,))
            if found is not None:
                yield found


def _views(flow: Flow, value: int, rank: Container[int]) -> tuple[str, Shape, Moves] | None:
    """Name and shape of the parameter that a static value is a view or cast of, and the operations between."""
    steps: list[tuple[Node, int]] = []
    while True:
        node = flow.trace.producer(value)
        if node.op == "parameter":
            shape = flow.trace.values[value].shape
            return (node.name, shape, steps[::-1]) if len(shape) in rank else None
        if not (getattr(node.function, "is_view", False) or base(node.op) in ("aten._to_copy", "aten.clone")):
            return None
        steps.append((node, node.outputs.index(value)))
        value = node.inputs[0]
