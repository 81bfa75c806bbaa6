"""Streams of one model with the same branches: what all of them but one have."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TypeAlias

from normprobe.anatomy.streams.streams import INSIDE, ReadStream

_Form: TypeAlias = frozenset[tuple[str, str, int]]
_LIKE = 2  # streams that have to end in a norm before another one with the same branches has to


def with_siblings(streams: Sequence[ReadStream]) -> list[ReadStream]:
    """The streams, one that may need a final norm being said to need it where all others with such branches have one,
    two of them at least (the stages of a pyramid), and a pool of it is read or it is returned. The norms of the others
    may belong to what makes the next stage smaller, so that they tell nothing of a head that reads place by place."""
    return [_with_siblings(stream, streams) for stream in streams]


def _with_siblings(stream: ReadStream, streams: Sequence[ReadStream]) -> ReadStream:
    if stream.open_end is None or stream.record.final_norm_reason != INSIDE:  # another stream goes on from it
        return stream
    if not (stream.open_end.pooled or stream.open_end.returned):
        return stream
    others = [other for other in streams if other is not stream and _form(other) == _form(stream)]
    if len(others) < _LIKE or any(other.record.final_norm is None for other in others):
        return stream
    reason = f"read without a norm by {stream.open_end.reader}, the {len(others)} other streams of such branches by one"
    needed = {"needs_final_norm": True, "final_norm_reason": reason, "raw_end": stream.open_end}
    return replace(stream, record=stream.record.model_copy(update=needed))


def _form(stream: ReadStream) -> _Form:
    """Kinds of the branches, with the place and count of their norms."""
    return frozenset((b.kind, b.placement, len(b.inner_norms)) for b in stream.record.branches)
