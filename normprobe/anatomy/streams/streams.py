"""The residual streams as records, with entry and final norm."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from torch import nn

from normprobe.anatomy.attention.ops import AttentionOp
from normprobe.anatomy.flow.ops import WEIGHTY, Role
from normprobe.anatomy.flow.steps import Flow, Step
from normprobe.anatomy.flow.walk import backward, light_chain
from normprobe.anatomy.streams.blocks import stream_name
from normprobe.anatomy.streams.branches import Reading, branch_records, norm_path, read_branches
from normprobe.anatomy.streams.features import feature_axes
from normprobe.anatomy.streams.raw_heads import raw_heads
from normprobe.anatomy.streams.readout import HeadWay, Readout, read_out
from normprobe.anatomy.streams.taps import taps
from normprobe.anatomy.streams.topology import topology
from normprobe.anatomy.streams.writes import Trunks, Write
from normprobe.records import Branch, NormSite, RawEnd, Stream
from normprobe.records.anatomy import Placement, Topology

_HELD = "norms on its sums hold the stream down, but for what is written behind the last of them"
_BESIDE: frozenset[Topology] = frozenset({"parallel_streams", "reversible"})
INSIDE = "its branches have their norms inside alone: whether its end needs one cannot be told"
_GROWING: frozenset[Placement] = frozenset({"pre", "sandwich", "output", "preact"})


def _entry(
    flow: Flow, source: int, ahead: bool, norms: Sequence[NormSite]
) -> tuple[float | None, tuple[Step, ...], tuple[Step, ...]]:
    """The constant factor on the way into the first read, the norm that this way begins with (no batch norm that is
    part of a layer), and the first block's own norm where that stands between (`ahead`)."""
    link = list(light_chain(flow, source))[-1]
    maker = flow.made_by(link.value)
    norm = (maker,) if maker is not None and maker.role is Role.NORM else ()
    if norm and ahead:
        return (*_entry(flow, norm[0].inputs[0], False, norms)[:2], norm)
    return link.factor(flow), tuple(n for n in norm if not _of_weights(flow, n, norms)), ()


def _table(flow: Flow, value: int) -> str | None:
    """The parameter whose rows a value is by moves and factors; None where it is not, or something was added."""
    *_, link = light_chain(flow, value)
    maker = flow.made_by(link.value)
    looked_up = maker is not None and maker.role is Role.SOURCE and len(maker.parameters) == 1
    return maker.parameters[0] if maker is not None and looked_up and not _shifted(flow, value) else None


def _shifted(flow: Flow, value: int) -> bool:
    """Whether something that is no signal is added on the light way to a value."""
    steps = (flow.made_by(link.value) for link in light_chain(flow, value))
    return any(step is not None and step.role is Role.SHIFT for step in steps)


def _of_weights(flow: Flow, norm: Step, norms: Sequence[NormSite]) -> bool:
    """Whether a batch norm stands right behind weights that do not come first: it is a part of that layer, one of
    several, and no norm on embeddings."""
    kind = norms[norm.group.norm].kind if norm.group is not None else "unknown"
    layer = _maker(flow, norm.inputs[0])
    if kind != "batchnorm" or layer is None or layer.role is not Role.MATMUL:
        return False
    earlier = backward(flow, layer.inputs[0], lambda step, _: step is None)
    return any(step is not None and step.role in WEIGHTY for _, step in earlier)


def _maker(flow: Flow, value: int) -> Step | None:
    """The step that a value comes from by light steps."""
    *_, link = light_chain(flow, value)
    return flow.made_by(link.value)


@dataclass(frozen=True)
class ReadStream:
    """One stream with the readings behind its branches.

    `open_end` is what reads its end raw where norms inside its branches alone leave open whether that needs a norm.
    `ahead` says that the norms on its sums belong to the blocks that follow: the skip is taken after each block's own
    norm (`h = norm(x); x = h + f(h)`), so that the last of them is the final norm; `own` is the first block's norm.
    """

    record: Stream
    readings: tuple[Reading, ...]
    own: tuple[Step, ...]
    ahead: bool
    open_end: RawEnd | None = None


def read_stream(
    flow: Flow,
    chain: Sequence[Write],
    attention: list[AttentionOp],
    norms: Sequence[NormSite],
    model: nn.Module,
    head: HeadWay,
    trunks: Trunks,
    alone: bool = True,
) -> ReadStream:
    """Read one stream.

    Args:
        flow: the flow.
        chain: its writes.
        attention: all attention operations.
        norms: all norm sites, as the groups of the flow number them.
        model: for the values of learned scales.
        head: the way to the first returned tensor.
        trunks: all residual adds.
        alone: whether the stream is no piece of a trunk that other streams are pieces of.
    """
    readings = read_branches(flow, chain, attention)
    branches = branch_records(flow, readings, norms, model)
    out = read_out(flow, _last_value(flow, readings), head)
    ahead = _ahead(branches)
    multiplier, entry_norms, own = _entry(flow, chain[0].source, ahead, norms)
    axes = feature_axes(flow, readings, norms)
    path = topology(flow, chain, trunks)
    record = Stream(
        name=stream_name([b.block for b in branches]),
        **_widths(flow, readings, axes),
        **_summary(branches),
        entry_norm=norm_path(entry_norms, norms),
        **_final(flow, readings, out, branches, norms, ahead, head, alone),
        **path,
        **_raw(flow, readings, out, head),
        input_multiplier=multiplier,
        source=_table(flow, chain[0].source),
        branches=tuple(_placed(branches, readings, axes, _taps(flow, chain, head, path))),
    )
    return ReadStream(record, tuple(readings), own, ahead, _open_end(record, out, norms))


def _taps(flow: Flow, chain: Sequence[Write], head: HeadWay, path: dict[str, Any]) -> Collection[int]:
    """The adds behind which features are taken off; of trunks side by side each goes past the adds of the others."""
    return () if path["topology"] in _BESIDE else taps(flow, chain, head.value, head.ancestors)


def _placed(
    branches: Sequence[Branch], readings: Sequence[Reading], axes: Sequence[int | None], tapped: Collection[int]
) -> Iterator[Branch]:
    """The branches with the axes of their features, and whether these are taken off behind them."""
    for branch, reading, axis in zip(branches, readings, axes, strict=True):
        yield branch.model_copy(update={"feature_axis": axis, "tapped": reading.write.step.id in tapped})


def _ahead(branches: Sequence[Branch]) -> bool:
    """Whether at every step from block to block the norm on the sum lies in the block that follows."""
    last = branches[-1]
    if last.post_norm is None or _inside(last.post_norm, last.block):
        return False
    steps = [(a, b) for a, b in pairwise(branches) if a.block != b.block]
    return bool(steps) and all(a.post_norm is not None and _inside(a.post_norm, b.block) for a, b in steps)


def _inside(path: str, block: str) -> bool:
    return path.startswith(block + ".")


def _last_value(flow: Flow, readings: Sequence[Reading]) -> int:
    """The stream behind its last write, and behind the norm on it where that belongs to the stream."""
    last = readings[-1]
    if last.post:
        return last.norms.on_sum[0].outputs[0]
    return last.write.output


def _raw(flow: Flow, readings: Sequence[Reading], out: Readout, head: HeadWay) -> dict[str, Any]:
    heads = raw_heads(flow, _last_value(flow, readings), head.ancestors)
    return {"raw_readers": out.raw_readers, "raw_heads": heads}


def _widths(flow: Flow, readings: Sequence[Reading], axes: Sequence[int | None]) -> dict[str, Any]:
    """The widths from first to last, and the axis of the features at most writes; nothing where one is not told."""
    shapes = [flow.shape(reading.write.output) for reading in readings]
    if None in axes:
        return {"width": None, "widths": (), "feature_axis": None}
    told = [axis for axis in axes if axis is not None]
    widths = tuple(dict.fromkeys(shape[axis] for shape, axis in zip(shapes, told, strict=True)))
    return {"width": widths[0], "widths": widths, "feature_axis": Counter(told).most_common(1)[0][0]}


def _summary(branches: Sequence[Branch]) -> dict[str, Any]:
    kinds = {b.placement for b in branches}
    placement = kinds.pop() if len(kinds) == 1 else "mixed"
    return {"depth": len(branches), "placement": placement, "parallel": any(b.parallel for b in branches)}


def _unread(readings: Sequence[Reading], head: HeadWay) -> str:
    """Why nothing reads the stream's end: it leads nowhere, or its features are taken before that."""
    count = sum(reading.write.step.id not in head.ancestors for reading in readings)
    if count in (0, len(readings)):
        return "the stream does not lead to the first output"
    return f"features are taken at an inner layer: the last {count} of {len(readings)} branches are not read"


def _final(
    flow: Flow,
    readings: Sequence[Reading],
    out: Readout,
    branches: Sequence[Branch],
    norms: Sequence[NormSite],
    ahead: bool,
    head: HeadWay,
    alone: bool,
) -> dict[str, Any]:
    """Path of the final norm, whether one is needed, and why, as fields of the record. A later output that reads the
    stream raw takes features, so that no norm is missing there."""
    inside = any(branch.normed_inside for branch in branches)
    path, needed, reason = _final_norm(out, branches, norms, ahead, alone, inside)
    if head.later and needed and path is None:
        needed, reason = None, f"the first output takes features at an inner layer; the end is {reason}"
    missing = needed and path is None and out.raw_way is not None
    end = _raw_end(out, norms) if missing else None
    reason = reason or _unread(readings, head)
    return {"final_norm": path, "needs_final_norm": needed, "final_norm_reason": reason, "raw_end": end}


def _open_end(record: Stream, out: Readout, norms: Sequence[NormSite]) -> RawEnd | None:
    return _raw_end(out, norms) if record.final_norm_reason == INSIDE else None


def _raw_end(out: Readout, norms: Sequence[NormSite]) -> RawEnd:
    later = norm_path(out.far, norms)
    return RawEnd(reader=out.raw_way or "", returned=out.returned, pooled=out.pooled, later=later)


def _final_norm(
    out: Readout, branches: Sequence[Branch], norms: Sequence[NormSite], ahead: bool, alone: bool, inside: bool
) -> tuple[str | None, bool | None, str]:
    last = branches[-1]
    if ahead:
        return last.post_norm, True, "found"
    if last.placement in ("post", "deepnorm"):
        return norm_path(out.direct, norms), False, "the last write is normed itself"
    if out.norm:
        return norm_path(out.norm, norms), True, "found"
    if out.beside:
        beside = norm_path(out.beside, norms)
        return None, None, f"returned raw as features; another returned tensor reads it through {beside}"
    if out.raw_way is None:
        return None, None, ""
    if last.placement == "postact":
        return None, False, "the stream ends in an activation"
    if len(branches) == 1 and alone:
        return None, False, "a stream of one write"
    if not any(b.placement in _GROWING for b in branches):
        if inside and not out.returned and all(b.placement == "none" for b in branches):
            return None, None, INSIDE
        return None, False, _HELD if any(b.post_norm for b in branches) else "nothing reads this stream through a norm"
    if not any(b.placement in _GROWING and not _batch_normed(b, norms) for b in branches):
        return None, False, "the norms on this stream are batch norms on what its branches write"
    if len(branches) == 1:
        return None, None, "a piece of a trunk that could not be followed from one write to the next"
    if out.far and not out.bent:
        return None, None, f"read by {out.raw_way} first; a norm follows behind weights, {norm_path(out.far, norms)}"
    return None, True, f"{'returned raw as' if out.returned else 'read without a norm by'} {out.raw_way}"


def _batch_normed(branch: Branch, norms: Sequence[NormSite]) -> bool:
    """Whether a batch norm alone sizes what a branch writes."""
    kinds = {n.path: n.kind for n in norms}
    return branch.placement == "output" and kinds.get(branch.output_norm or "") == "batchnorm"
