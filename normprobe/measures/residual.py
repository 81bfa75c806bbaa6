"""The residual stream from its first write to its last: growth, dilution, headroom, massive activations."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from torch import Tensor

from normprobe import stats, theory
from normprobe.capture.watch import Watched
from normprobe.measures import massive, outliers
from normprobe.measures.together import Together
from normprobe.measures.trunk import Trunk
from normprobe.measures.writes import WriteHandler
from normprobe.measures.written import Written, alike, tell
from normprobe.records import Basis, Branch, Headroom, OpSite, Skipped, Stream, StreamMeasure, StreamState


def write_handlers(stream: Stream, padding: Sequence[Tensor] = (), seed: int = 0) -> dict[OpSite, WriteHandler]:
    """One handler for each add of `stream`, in order; branches that are merged before an add share it. None where the
    axis of the features is not told.

    Args:
        stream: the stream.
        padding: masks [B, S], True for tokens to leave out; the one that has the stream's shape counts.
        seed: of the sample of tokens.
    """
    told = [(branch, branch.feature_axis) for branch in stream.branches if branch.feature_axis is not None]
    shared = {axis: Trunk(axis, padding, seed) for _, axis in told}
    together = Together(tell, alike)
    return {branch.add: WriteHandler(shared[axis], together, branch) for branch, axis in told}


def read_stream(
    stream: Stream,
    handlers: Mapping[OpSite, WriteHandler],
    watched: Watched,
    lengths: Collection[int] = (),
) -> tuple[StreamMeasure | None, tuple[Skipped, ...]]:
    """The measure of one stream from what its handlers saw.

    Args:
        stream: the stream.
        handlers: those of `write_handlers(stream)`, told of one forward.
        watched: that forward.
        lengths: lengths of query sequences of the model's attention, which tell a sequence-first layout.

    Returns:
        The measure (None where no write was seen), and the writes that were not. The exponent is NaN where a
        write is missing.
    """
    reasons = _reasons(stream, handlers, watched)
    skipped = [
        Skipped(what=f"residual stream {stream.name}, write {site.path}#{site.op}:{site.ordinal}", why=why)
        for site, why in reasons.items()
        if why is not None
    ]
    writes = {site: handler.written() for site, handler in handlers.items()}
    seen = [(site, written) for site, written in writes.items() if written is not None]
    if not seen:
        return None, tuple(skipped)
    merged = _merged(stream)
    first, axis = seen[0][1], _axis(merged[seen[0][0]])
    measure = StreamMeasure(
        stream=stream.name,
        basis=Basis(unit="1", dtype=first.dtype, count=first.tokens),
        states=tuple(_placed(merged[site], written, lengths) for site, written in seen),
        headroom=_headroom(max((written.abs_max for _, written in seen), key=_nan_last)),
        massive=massive.merge(
            [written.massive for _, written in seen], lambda token: position(token, first.shape, axis, lengths)
        ),
        outliers=outliers.merge([written.outliers for _, written in seen]),
        **_growth([writes.get(site) for site in reasons]),
    )
    return measure, tuple(skipped)


def _reasons(stream: Stream, handlers: Mapping[OpSite, WriteHandler], watched: Watched) -> dict[OpSite, str | None]:
    """Why a write was not measured, for each write in order; None for those that were."""
    return {
        branch.add: "the axis of its features could not be told from the data flow"
        if branch.feature_axis is None
        else _missing(branch.add, handlers[branch.add], watched)
        for branch in stream.branches
    }


def _growth(writes: Sequence[Written | None]) -> dict[str, Any]:
    """What all writes together say; NaN where one was not seen."""
    medians = [math.nan if one is None else one.rms.median for one in writes]
    sizes = [math.nan if one is None else one.sides.write for one in writes]
    entry = math.nan if writes[0] is None else writes[0].sides.entry
    return {
        "entry_rms": entry,
        "entry_cosine": math.nan if writes[0] is None else writes[0].before,
        "growth": stats.growth(medians),
        "independent_rms": theory.independent_growth(sizes, entry),
        "effective_depth": stats.participation([size**2 for size in sizes]),
    }


def _nan_last(value: float) -> tuple[bool, float]:
    return math.isnan(value), value


def _headroom(largest: float) -> Headroom:
    formats = theory.FLOAT16, theory.BFLOAT16, theory.FLOAT8_E4M3, theory.FLOAT8_E5M2
    room = [math.inf if largest == 0 else each.largest / largest for each in formats]
    return Headroom(float16=room[0], bfloat16=room[1], float8_e4m3=room[2], float8_e5m2=room[3])


def _missing(site: OpSite, handler: WriteHandler, watched: Watched) -> str | None:
    """Why the write at `site` was not measured; None where it was."""
    why = watched.reason(site)
    if why is not None or handler.written() is not None:
        return why
    return handler.failed or "no output was seen"


def _merged(stream: Stream) -> dict[OpSite, list[tuple[int, Branch]]]:
    """The branches that each add writes, with their places in the stream."""
    merged: dict[OpSite, list[tuple[int, Branch]]] = {}
    for index, branch in enumerate(stream.branches):
        merged.setdefault(branch.add, []).append((index, branch))
    return merged


def _placed(merged: Sequence[tuple[int, Branch]], written: Written, lengths: Collection[int]) -> StreamState:
    index, last = merged[-1]
    return StreamState(
        branch=index,
        path=last.place,
        block=last.block,
        kind="+".join(dict.fromkeys(branch.kind for _, branch in merged)),
        rms_median=written.rms.median,
        rms_p99=written.rms.p99,
        rms_max=written.rms.max,
        rms_argmax=written.rms.argmax,
        position=position(written.rms.argmax, written.shape, _axis(merged), lengths),
        abs_max=written.abs_max,
        abs_argmax_channel=written.channel,
        mean=written.moments.mean,
        std=written.moments.std,
        first_rms=written.moments.first_rms,
        other_rms=written.moments.other_rms,
        token_cosine=written.moments.token_cosine,
        stable_rank=written.stable_rank,
        write_rms=written.sides.write,
        write_max=written.sides.largest,
        write_ratio=written.sides.ratio,
        write_share=written.sides.share,
        write_cosine=written.sides.cosine,
        angle=written.sides.angle,
        bf16_loss=written.rounding[0],
        fp16_loss=written.rounding[1],
        finite=math.isfinite(written.abs_max),
    )


def _axis(merged: Sequence[tuple[int, Branch]]) -> int:
    """The axis of the features at a write that was measured."""
    return next(branch.feature_axis for _, branch in merged if branch.feature_axis is not None)


def position(token: int, shape: Sequence[int], feature_axis: int, lengths: Collection[int] = ()) -> int:
    """The place along the sequence of the token with this flat index.

    The first axis of three or more counts as the batch, except where attention runs over sequences as long as
    the first axis and over none as long as the second. The others, of maps too, are counted in one flat
    index.
    """
    axes = list(shape)
    del axes[feature_axis]
    if len(axes) < 2:
        return token
    if len(axes) == 2 and feature_axis == -1 and axes[0] in lengths and axes[1] not in lengths:
        return token // axes[1]
    return token % math.prod(axes[1:])
