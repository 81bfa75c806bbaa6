"""The role of every norm: what it stands before, behind or on."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from normprobe.anatomy.attention.sites import ReadSite
from normprobe.anatomy.flow.ops import WEIGHTY, Role
from normprobe.anatomy.flow.steps import Flow, Step
from normprobe.anatomy.streams.branches import norm_path
from normprobe.anatomy.streams.streams import ReadStream
from normprobe.records import NormSite
from normprobe.records.norms import NormRole

Mark = tuple[NormRole, str | None]


def with_roles(
    norms: Sequence[NormSite],
    streams: Sequence[ReadStream],
    others: Iterable[tuple[NormRole, Step]],
    attention: Iterable[ReadSite],
    flow: Flow,
) -> tuple[NormSite, ...]:
    """The norm sites with their roles, the first that fits, and whether nothing reads them; a norm that nothing names
    is `inner`.

    Args:
        norms: the sites.
        streams: the streams.
        others: norms that lie elsewhere, with their roles.
        attention: the attention sites.
        flow: the flow.
    """
    roles: dict[str, NormRole] = {}
    elsewhere = [*others, *(("head", step) for step in _behind(flow, streams))]
    marks = ((role, norm_path((step,), norms)) for role, step in elsewhere)
    for role, path in (*_marks(norms, streams, attention, flow), *marks):
        if path is not None:
            roles.setdefault(path, role)
    unread = _unread(flow)
    facts = [{"role": roles.get(n.path, n.role), "unread": i in unread} for i, n in enumerate(norms)]
    return tuple(norm.model_copy(update=more) for norm, more in zip(norms, facts, strict=True))


def _unread(flow: Flow) -> set[int]:
    """The numbers of norms whose results no step reads and nothing returns."""
    steps = [step for step in flow.steps if step.role is Role.NORM and step.group is not None]
    read = {s.group.norm for s in steps if s.group and any(flow.readers(v) or v in flow.outputs for v in s.outputs)}
    return {step.group.norm for step in steps if step.group} - read


def _marks(
    norms: Sequence[NormSite], streams: Sequence[ReadStream], attention: Iterable[ReadSite], flow: Flow
) -> Iterator[Mark]:
    for stream in streams:
        yield "final", stream.record.final_norm
        yield from _stream_marks(norms, stream)
    for site in attention:
        yield from (("query", norm_path((step,), norms)) for step in site.query_norms)
        yield from (("key", norm_path((step,), norms)) for step in site.key_norms)
    for step in _on_embeddings(flow, streams):
        yield "embedding", norm_path((step,), norms)


def _stream_marks(norms: Sequence[NormSite], stream: ReadStream) -> Iterator[Mark]:
    for reading in stream.readings if stream.ahead else ():
        yield from (("pre", norm_path((s,), norms)) for s in reading.norms.on_sum)
    yield "pre", norm_path(stream.own, norms)
    yield "embedding", stream.record.entry_norm
    for reading in stream.readings:
        around = reading.norms
        yield from (("pre", norm_path((s,), norms)) for s in around.before)
        yield from (("output", norm_path((s,), norms)) for s in around.behind)
        if reading.post:
            yield from (("post", norm_path((s,), norms)) for s in around.on_sum)


def _behind(flow: Flow, streams: Sequence[ReadStream]) -> Iterator[Step]:
    """Norms behind the last write of all streams."""
    last = max((r.write.step.id for s in streams for r in s.readings), default=len(flow.steps))
    yield from (step for step in flow.steps[last + 1 :] if step.role is Role.NORM)


def _on_embeddings(flow: Flow, streams: Sequence[ReadStream]) -> Iterator[Step]:
    """Norms before the first write of any stream, outside its branches, that no weights stand before."""
    first = min((r.write.step.id for s in streams for r in s.readings), default=0)
    inside = frozenset[int]().union(*(r.part.region for s in streams for r in s.readings))
    weighted: set[int] = set()
    for step in flow.steps[:first]:
        if step.role in WEIGHTY or any(v in weighted for v in step.inputs):
            weighted.update(step.outputs)
        elif step.role is Role.NORM and step.id not in inside:
            yield step
