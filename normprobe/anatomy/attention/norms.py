"""QK-Norm: the norms on queries and keys, and what their statistics are taken of."""

from __future__ import annotations

from typing import Literal

from torch import Tensor

from normprobe.anatomy.attention.ops import AttentionOp
from normprobe.anatomy.attention.sides import Side
from normprobe.anatomy.flow.ops import base
from normprobe.anatomy.flow.replay import ABSENT, counted, sent
from normprobe.anatomy.flow.steps import Flow, Step
from normprobe.records import NormSite, QKNorm

Axis = Literal["head", "full", "heads", "tokens", "unknown"]


def qk_norm(flow: Flow, op: AttentionOp, sides: tuple[Side, Side], norms: list[NormSite]) -> QKNorm | None:
    """The norms between the projections of query and key and their product; None where there are none."""
    sites = [site_of(side, norms) for side in sides]
    known = [i for i, site in enumerate(sites) if site is not None]
    if not known:
        return None
    site, side = sites[known[0]], sides[known[0]]
    assert site is not None
    operand, features = ((op.query, -1), (op.key, op.across[0]))[known[0]]
    rope: Literal["before", "after", "none", "unknown"] = "none"
    if side.mixed:
        rope = "after" if side.norm_after_mix else "before"
    return QKNorm(
        kind=site.kind,
        axis=_by_rows(flow, side, site, operand, features) or _by_size(site, flow.shape(op.query)[-1]),
        query=sites[0].path if sites[0] else None,
        key=sites[1].path if sites[1] else None,
        rope=rope,
    )


def site_of(side: Side, norms: list[NormSite]) -> NormSite | None:
    """The norm of a side; a batch norm is none, it belongs to the projection and holds no query or key down."""
    group = side.norms[0].group if side.norms else None
    site = None if group is None else norms[group.norm]
    return None if site is None or site.kind == "batchnorm" else site


def _by_rows(flow: Flow, side: Side, site: NormSite, operand: int, features: int) -> Axis | None:
    """What a statistic is taken of, by the features of the projection that it and the first head hold; None where a
    move between them cannot be followed."""
    norm = side.norms[0]
    if side.projection is None or not site.axes or site.groups is not None:
        return None
    shape = flow.shape(side.projection.outputs[0])
    channels = 1 if base(side.projection.node.op) == "aten.convolution" else len(shape) - 1
    moves = side.moves[::-1]
    before = [(step, place) for step, place in moves if step.id < norm.id]
    head = _held(flow, moves, counted(shape, channels), operand, (features,))
    statistic, *places = (
        _held(flow, before, counted(shape, axis), norm.inputs[0], site.axes)
        for axis in (channels, *(i for i in range(len(shape)) if i != channels))
    )
    if not head or not statistic or None in places:
        return None
    if any(len(found) > 1 for found in places if found is not None):
        return "tokens"
    if statistic <= head:
        return "head"
    return "full" if head <= statistic else "heads"


def _held(
    flow: Flow, moves: list[tuple[Step, int]], numbers: Tensor, value: int, over: tuple[int, ...]
) -> set[int] | None:
    """The numbers that lie along the axes `over` of `value`, at the first place of all others, when they are sent
    through the moves that it is made by; None where they cannot be."""
    found = sent(flow, [(step.node, place) for step, place in moves], numbers)
    count = len(flow.shape(value))
    if found is None or found.shape != flow.shape(value) or any(not -count <= axis < count for axis in over):
        return None
    kept = {axis % count for axis in over}
    first = found[tuple(slice(None) if axis in kept else 0 for axis in range(count))]
    return {number for number in first.flatten().tolist() if number != ABSENT}


def _by_size(site: NormSite, head_dim: int) -> Axis:
    """The same by the size of the statistic alone."""
    if site.size is None or site.size < head_dim:
        return "unknown"
    return "head" if site.size == head_dim else "full"
