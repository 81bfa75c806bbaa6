"""Which keys a mask hides from which queries, read from what is added to or written over the logits.

Dims: N samples (all leading axes together), Q queries, K keys.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from normprobe.anatomy.attention.unseen import GAP, unseen
from normprobe.anatomy.flow.levels import Level
from normprobe.anatomy.flow.ops import Role, base, classify
from normprobe.anatomy.flow.replay import replay
from normprobe.anatomy.flow.steps import Flow
from normprobe.anatomy.flow.walk import constant_factor
from normprobe.capture.trace import Node, Ref

_DEEPEST = 64  # operations between the logits and what masks them
_FINITE = frozenset({Role.MATMUL, Role.ATTENTION, Role.SOFTMAX, Role.NORM, Role.SOURCE})


@dataclass(frozen=True)
class Hidden:
    """`places` is true where a key is hidden from a query (None: nowhere); it broadcasts to the logits.

    `more` says that other places may be hidden too, `biased` that something besides a mask is added, `sinks` which
    columns the softmax has besides those of keys, a half-open range.
    """

    places: Tensor | None = None
    more: bool = False
    biased: bool = False
    sinks: tuple[int, int] | None = None


NOTHING, UNKNOWN, BIAS = Hidden(), Hidden(more=True), Hidden(biased=True)


class MaskReader:
    """Walks back from logits, or from a mask, to `product`, the node that multiplies q and k (-1: there is none)."""

    def __init__(self, flow: Flow, product: int = -1) -> None:
        self.flow, self.product = flow, product

    def given(self, value: int) -> Hidden:
        """What a mask that is given to an attention operation hides: False, or what is added, far below zero."""
        if self.flow.trace.values[value].dtype is not torch.bool:
            return self.added(value)
        shown = self._tensor(value)
        return UNKNOWN if shown is None else Hidden(~shown)

    def added(self, value: int, depth: int = 0, factor: float = 1.0) -> Hidden:
        """What `value`, times a factor, hides where it is added to the logits, or is the logits themselves."""
        node = self.flow.trace.producer(value)
        if node.id == self.product:
            return self._accumulated(node, depth, factor)
        known = self._tensor(value)
        if known is not None:
            return _far_below(known * factor)
        if depth > _DEEPEST:
            return UNKNOWN
        name = base(node.op).removesuffix("_")
        reader = self._READERS.get(name)
        return reader(self, node, depth + 1, factor) if reader else self._other(node, value, depth + 1, factor)

    def _accumulated(self, node: Node, depth: int, factor: float) -> Hidden:
        """What a product is added to (`baddbmm`); without a weight of it there is nothing."""
        beta = node.kwargs.get("beta", 1)
        if base(node.op) != "aten.baddbmm" or beta == 0:
            return NOTHING
        first = node.args[0].value
        empty = base(self.flow.trace.producer(first).op) in ("aten.empty", "aten.new_empty")
        return NOTHING if empty else self.added(first, depth + 1, factor * beta)

    def _add(self, node: Node, depth: int, factor: float) -> Hidden:
        factors = factor, factor * node.kwargs.get("alpha", 1)
        operands = zip(node.args[:2], factors, strict=True)
        return _either(*(self.added(a.value, depth, each) for a, each in operands if isinstance(a, Ref)))

    def _sub(self, node: Node, depth: int, factor: float) -> Hidden:
        """A difference; what is subtracted may be the row's own maximum, which is no bias."""
        first = self.added(node.args[0].value, depth, factor) if isinstance(node.args[0], Ref) else NOTHING
        taken = self._tensor(node.args[1].value) if isinstance(node.args[1], Ref) else None
        alpha = node.kwargs.get("alpha", 1)
        return first if taken is None else _either(first, _far_below(-alpha * factor * taken))

    def _masked_fill(self, node: Node, depth: int, factor: float) -> Hidden:
        x, mask, fill = node.args[:3]
        far = self._number(fill) * factor <= -GAP
        inside, places = self.added(x.value, depth, factor), self._tensor(mask.value)
        if places is None:
            return _either(inside, UNKNOWN) if far else Hidden(None, True, inside.biased, inside.sinks)
        places = places.bool()
        return _either(inside, Hidden(places)) if far else _only(inside, ~places)

    def _maximum(self, node: Node, depth: int, factor: float) -> Hidden:
        """The larger of logits and a lowest number hides what both hide."""
        if factor < 0:
            return UNKNOWN
        first, second = (self.added(v, depth, factor) for v in node.inputs[:2])
        places = None if first.places is None or second.places is None else first.places & second.places
        return Hidden(places, first.more or second.more, first.biased or second.biased)

    def _where(self, node: Node, depth: int, factor: float) -> Hidden:
        if len(node.args) < 3:
            return UNKNOWN
        chosen, *sides = node.args
        first, second = (self._side(side, depth, factor) for side in sides)
        places = self._tensor(chosen.value)
        if places is None:
            return Hidden(None, True, first.biased or second.biased, first.sinks or second.sinks)
        places = places.bool()
        return _either(_only(first, places), _only(second, ~places))

    def _side(self, side: object, depth: int, factor: float) -> Hidden:
        if isinstance(side, Ref):
            return self.added(side.value, depth, factor)
        return Hidden(torch.tensor(self._number(side) * factor <= -GAP))

    def _cat(self, node: Node, depth: int, factor: float) -> Hidden:
        """Logits with more beside them; what is no product of this softmax is a sink."""
        axis = node.args[1] if len(node.args) > 1 else 0
        parts = [part.value for part in node.args[0]]
        rank = len(self.flow.trace.values[node.outputs[0]].shape)
        signals = [v for v in parts if self.flow.levels.signal(v)]
        if axis % rank != rank - 1 or len(signals) != 1:
            return UNKNOWN
        found = self.added(signals[0], depth, factor)
        widths = [self.flow.trace.values[v].shape[-1] for v in parts]
        if len(parts) == 1 or signals[0] not in (parts[0], parts[-1]):
            return found if len(parts) == 1 else UNKNOWN
        sinks = (widths[0], sum(widths)) if signals[0] == parts[0] else (0, sum(widths[:-1]))
        return Hidden(found.places, found.more, found.biased, sinks)

    _READERS: ClassVar[dict[str, Callable[[MaskReader, Node, int, float], Hidden]]] = {
        "aten.add": _add,
        "aten.sub": _sub,
        "aten.masked_fill": _masked_fill,
        "aten.where": _where,
        "aten.cat": _cat,
        "aten.maximum": _maximum,
    }

    def _other(self, node: Node, value: int, depth: int, factor: float) -> Hidden:
        """Views move what is hidden; what weights or tables make is finite, and so is a function of finite values."""
        signals = frozenset(v for v in node.inputs if self.flow.levels.signal(v))
        role = classify(node, signals or frozenset(node.inputs[:1])) if node.inputs else Role.SOURCE
        if node.op in ("buffer", "input", "constant"):
            return UNKNOWN
        if role in _FINITE or base(node.op) == "aten.embedding":
            return BIAS
        tensors = [v for v in node.inputs if signals == frozenset() or v in signals]
        own = self._factor(value) if role is Role.SCALE else 1.0
        found = [self.added(v, depth, factor * (own or 1.0)) for v in tensors]
        if len(found) == 1 and found[0].places is not None:
            kept = own and role in (Role.MOVE, Role.SCALE)
            return self._moved(node, value, tensors[0], found[0]) if kept else UNKNOWN
        if any(f.places is not None or f.more for f in found):
            return UNKNOWN
        return _either(*found) if found else UNKNOWN

    def _factor(self, value: int) -> float | None:
        step = self.flow.made_by(value)
        return None if step is None else constant_factor(self.flow, step, self.flow.statics.number)

    def _moved(self, node: Node, value: int, source: int, found: Hidden) -> Hidden:
        shape = self.flow.trace.values[source].shape
        if found.places is None or shape == self.flow.trace.values[value].shape:
            return found
        places = replay(self.flow, node, found.places.expand(shape), node.outputs.index(value))
        return Hidden(places, found.more or places is None, found.biased, found.sinks)

    def _tensor(self, value: int) -> Tensor | None:
        levels = self.flow.levels
        if levels.of[value] is Level.SIGNAL and not levels.raw(value):
            return None
        return self.flow.statics.tensor(value)

    def _number(self, fill: object) -> float:
        """The number that is written over logits; 0 (which hides nothing) where it is not known."""
        if isinstance(fill, (int, float)):
            return float(fill)
        held = self._tensor(fill.value) if isinstance(fill, Ref) else None
        return float(held.max()) if held is not None and held.numel() else 0.0


def _far_below(added: Tensor) -> Hidden:
    places = unseen(added)
    return Hidden(places if bool(places.any()) else None, biased=bool((added.masked_fill(places, 0) != 0).any()))


def _either(*found: Hidden) -> Hidden:
    places, more = None, any(f.more for f in found)
    for part in (f.places for f in found if f.places is not None):
        if places is not None and not _broadcast(places, part):  # masks of logits with sinks and of logits without
            return UNKNOWN
        places = part if places is None else places | part
    return Hidden(places, more, any(f.biased for f in found), next((f.sinks for f in found if f.sinks), None))


def _broadcast(a: Tensor, b: Tensor) -> bool:
    return all(1 in sizes or sizes[0] == sizes[1] for sizes in zip(a.shape[::-1], b.shape[::-1], strict=False))


def _only(found: Hidden, places: Tensor) -> Hidden:
    """What is hidden at `places` alone."""
    hidden = None if found.places is None else found.places & places
    return Hidden(hidden, found.more, found.biased, found.sinks)
