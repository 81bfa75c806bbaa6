"""Sums over the axis of a stack in which numbers weigh what was stacked."""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from normprobe.anatomy.flow.ops import base
from normprobe.anatomy.flow.pieces import summands
from normprobe.anatomy.flow.steps import Flow, ref
from normprobe.capture.trace import Node

_PRODUCTS = frozenset({"aten.mul", "aten.mul_"})
Weighted = dict[int, float]


def weighted(flow: Flow, node: Node) -> Weighted:
    """The tensors whose weighted sum `node` is, with their weights; empty where it is none, or the weights are no
    numbers, or learned."""
    held = summands(flow.trace, node)
    if held:
        return dict.fromkeys(held, 1.0)
    product = flow.trace.producer(ref(node.args[0])) if node.args and ref(node.args[0]) >= 0 else None
    if product is None or base(product.op) not in _PRODUCTS:
        return {}
    for stacked, weights in (product.args[:2], product.args[1::-1]):
        held = summands(flow.trace, replace(node, args=(stacked, *node.args[1:]), inputs=(ref(stacked),)))
        numbers = _numbers(flow, ref(weights))
        if held and numbers is not None:
            rows = numbers.expand(flow.shape(ref(stacked))).movedim(int(node.args[1][0]), 0).flatten(1)
            return _paired(held, rows.T)
    return {}


def _numbers(flow: Flow, value: int) -> Tensor | None:
    """What a value holds that is no signal and not learned."""
    if value < 0 or flow.levels.signal(value) or flow.levels.parameters(value):
        return None
    return flow.statics.tensor(value)


def _paired(parts: tuple[int, ...], rows: Tensor) -> Weighted:
    """Each tensor with its weight, where every row holds the same ones."""
    if not bool((rows == rows[:1]).all()):
        return {}
    return dict(zip(parts, rows[0].tolist(), strict=True))
