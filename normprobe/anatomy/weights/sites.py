"""The weights of the model, each once, with its roles in the streams."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from normprobe.anatomy.flow.levels import Level
from normprobe.anatomy.flow.ops import Role, base
from normprobe.anatomy.flow.steps import Flow, Step
from normprobe.anatomy.streams.readout import steps_behind
from normprobe.anatomy.streams.streams import ReadStream
from normprobe.anatomy.weights.axes import Layout, layouts
from normprobe.anatomy.weights.followers import Activation, follower
from normprobe.anatomy.weights.rows import next_products
from normprobe.capture.trace import Node
from normprobe.records import Head, OpSite, Stream, WeightSite
from normprobe.records.weights import WeightRole

Place = tuple[WeightRole, int | None, int | None]  # role, stream, branch
Use = tuple[Step | None, Node, str, Layout]
_LOOKUPS = frozenset({"aten.embedding", "aten.index_select", "aten.index"})


def find_weights(flow: Flow, streams: Sequence[ReadStream], head: Head | None) -> tuple[WeightSite, ...]:
    """Every parameter that the recorded forward used as a matrix, a kernel or a table of rows, in order of first use;
    those that are computed from other parameters first are left out."""
    places = _places([s.record for s in streams])
    starts = dict(reversed(list(_starts(flow, streams))))  # of several streams the first
    shapes = {n.name: flow.shape(n.outputs[0]) for n in flow.trace.nodes if n.op == "parameter"}
    heads = {head.path, head.tied_to} if head is not None else set[str | None]()
    before = _before(flow)
    found: dict[str, WeightSite] = {}
    roles: dict[str, dict[WeightRole, None]] = {}
    for used in _used(flow):
        name, layout = used[2:]
        held = [*places.get(name, ())]
        if name in starts:
            held.append(("embedding", starts[name], None))
        if name in heads and layout.kind != "embedding":
            held.append(("head", None, None))
        roles.setdefault(name, {}).update(dict.fromkeys(role for role, _, _ in held))
        if name not in found:
            source = None if used[0] is None else before.get(used[0].id)
            found[name] = _site(flow, used, held, shapes[name]).model_copy(update={"source": source})
    return tuple(s.model_copy(update={"roles": tuple(roles[n]) or ("other",)}) for n, s in found.items())


def _site(flow: Flow, used: Use, held: Sequence[Place], shape: tuple[int, ...]) -> WeightSite:
    step, node, name, layout = used
    call = flow.trace.calls[node.call]
    passed = Activation("none") if step is None else follower(flow, step)
    stream, branch = next(((s, b) for _, s, b in held), (None, None))
    return WeightSite(
        parameter=name,
        roles=(),
        stream=stream,
        branch=branch,
        shape=shape,
        fan_in=layout.fan_in,
        fan_out=layout.fan_out,
        output_axis=layout.output_axis,
        kind=layout.kind,
        operand=layout.operand,
        followed_by=passed.name,
        slope=passed.slope,
        site=OpSite(path=call.path, op=node.op, ordinal=node.ordinal, execution=call.execution),
    )


def _before(flow: Flow) -> Mapping[int, str]:
    """For each product by its step the weight whose product alone it reads, with nothing but activations between."""
    return {
        read.id: name
        for step, _, name, layout in _used(flow)
        if step is not None and layout.kind != "embedding"
        for read in next_products(flow, step)
    }


def _places(streams: Sequence[Stream]) -> Mapping[str, list[Place]]:
    """The role of every parameter of the branches; of one that several branches share, in the first of them."""
    found: dict[str, list[Place]] = {}
    for i, stream in enumerate(streams):
        for k, branch in enumerate(stream.branches):
            for name in branch.parameters:
                if name not in found:
                    found[name] = _roles(name, branch.readers, branch.writers, i, k)
    return found


def _roles(name: str, readers: Sequence[str], writers: Sequence[str], stream: int, branch: int) -> list[Place]:
    ends: list[tuple[WeightRole, Sequence[str]]] = [("reader", readers), ("writer", writers)]
    return [(role, stream, branch) for role, names in ends if name in names] or [("inner", stream, branch)]


def _starts(flow: Flow, streams: Sequence[ReadStream]) -> Iterator[tuple[str, int]]:
    """Parameters on the way into the first write of a stream that comes from no write of another one."""
    written = {r.write.step.id for s in streams for r in s.readings}
    written |= {i for s in streams for r in s.readings for i in r.part.region}
    behind_writes: set[int] = set()
    for step in flow.steps:
        if step.id in written or any(v in behind_writes for v in step.inputs):
            behind_writes.update(step.outputs)
    for i, stream in enumerate(streams):
        for index in steps_behind(flow, stream.readings[0].write.source):
            step = flow.steps[index]
            if step.role is not Role.NORM and behind_writes.isdisjoint(step.outputs):
                yield from ((name, i) for name in step.parameters)


def _used(flow: Flow) -> Iterator[Use]:
    """Products, convolutions and lookups in order of time; the step is None where the input does not decide them."""
    steps = {s.node.id: s for s in flow.steps if s.role in (Role.MATMUL, Role.SOURCE)}
    for node in flow.trace.nodes:
        if base(node.op) in _LOOKUPS and node.inputs:
            maker, size = flow.trace.producer(node.inputs[0]), flow.shape(node.inputs[0])
            by_place = all(flow.levels.of[v] is not Level.SIGNAL for v in node.inputs)
            if maker.op == "parameter" and len(size) == 2 and by_place:
                yield steps.get(node.id), node, maker.name, Layout(1, size[1], 1, "embedding", 0)
        elif node.id in steps:
            yield from ((steps[node.id], node, name, layout) for name, layout in layouts(flow.trace, node))
