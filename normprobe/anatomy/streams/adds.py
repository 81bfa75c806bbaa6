"""Residual adds: sums in which one side comes from an ancestor of the other by light steps, the other by heavy ones.

A shortcut that is a single projection (a strided convolution, say) or a pooling counts as light where the other side is
not linear.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

from normprobe.anatomy.flow.ops import WEIGHTY, Role, slides
from normprobe.anatomy.flow.steps import Flow, Step
from normprobe.anatomy.flow.walk import light_chain, operand_factor
from normprobe.anatomy.streams.copies import apart
from normprobe.anatomy.streams.moves import chooses
from normprobe.anatomy.streams.parts import (
    Part,
    bends,
    between,
    enters,
    gate_of,
    heavy,
    make_part,
    region_to,
    steering,
)
from normprobe.anatomy.streams.selections import latest, put_together, side_by_side, taken_out
from normprobe.anatomy.streams.shortcuts import projected, projections
from normprobe.anatomy.streams.sources import common_source, latest_weighty, unviewed
from normprobe.anatomy.streams.splits import split
from normprobe.anatomy.streams.trunks import joins, mixture, states
from normprobe.anatomy.streams.writes import State, Trunks, Way, Write

_WAYS: tuple[tuple[int, Way], ...] = (
    (0, "light"),
    (1, "light"),
    (0, "projected"),
    (1, "projected"),
    (0, "mixed"),
    (1, "mixed"),
    (0, "gated"),
    (1, "gated"),
)


def find_writes(flow: Flow) -> Trunks:
    """All residual adds, the sums of two states of one trunk and the choices between them, in order of time."""
    trunks = Trunks()
    for step in flow.steps:
        if step.role is Role.MOVE:
            _read_move(flow, step, trunks)
        elif step.role is Role.ADD and len(step.inputs) == 2:
            _read_sum(flow, step, trunks)
        elif step.role is Role.MATMUL and len(step.inputs) == 1 and step.parameters:
            later = side_by_side(flow, step, trunks)
            if later is not None:
                trunks.drawn[step.id] = later
    return trunks


def _read_move(flow: Flow, step: Step, trunks: Trunks) -> None:
    """Enter a move where it chooses between states of a trunk, puts its pieces together, or takes it out again."""
    if len(step.inputs) > 1:
        chosen = latest(flow, step, trunks)
        chosen = put_together(flow, step, trunks) if chosen is None else chosen
        if chosen is not None:
            trunks.choices[step.id] = chosen
    elif step.inputs:
        piece = taken_out(flow, step, trunks)
        if piece is not None:
            trunks.pieces[step.outputs[0]] = piece


def _read_sum(flow: Flow, step: Step, trunks: Trunks) -> None:
    """Enter a sum where it is a residual add or a sum of two states; the trunk of an add has the sum's full shape."""
    full = [flow.shape(v) == flow.shape(step.outputs[0]) for v in step.inputs]
    later = joins(flow, step, trunks) if all(full) else None
    if later is not None:
        trunks.merges[step.id] = later
        return
    for trunk, way in _WAYS:
        write = _match(flow, step, trunk, way, trunks) if full[trunk] and (all(full) or way != "projected") else None
        if write is not None:
            trunks.writes[step.id] = write
            trunks.ends.setdefault(write.whole.end, []).append(step.id)
            _uncross(flow, write, trunks.writes)
            _unite(flow, write, trunks)
            return


def _match(flow: Flow, step: Step, trunk: int, way: Way, trunks: Trunks) -> Write | None:
    end, side = step.inputs[1 - trunk], step.inputs[trunk]
    if (way == "gated" and not _coupled(flow, side, end)) or (way == "projected" and _drawn_on(flow, side, end)):
        return None
    hit = common_source(flow, _chain(flow, side, way, trunks), end)
    if hit is None:
        return None
    link, over, visited = hit
    if way == "gated":
        link, visited = unviewed(flow, link, end)
    if not any(flow.steps[i].role in WEIGHTY for i in visited):
        return None
    if way == "projected" and not projections(flow, side).isdisjoint(visited):  # the branch reads that projection too
        return None
    cut = _cut(flow, link.value, end, between(flow, link.value, visited), trunks.writes)
    if cut is None:
        return None
    source, crossed, region = cut
    part = make_part(flow, source, end, region, gates=way == "gated")
    if not _fits(flow, source, part, way):
        return None
    if way in ("light", "mixed") and apart(flow, source, side, part.core) and not _put_back(flow, step):
        return None
    parts, factor = tuple(split(flow, source, part, trunks.writes)), link.factor(flow)
    scale = None if factor is None else factor * operand_factor(step, side)
    scale = _with_share(flow, scale, operand_factor(step, end), end, source) if way == "light" and not over else scale
    if scale is not None and scale < 0:  # f(x) - x, as in x + r·(f(x) - x), is no state of the trunk
        trunks.refused.add(step.id)
        return None
    return Write(step, trunk, source, scale, part, parts, over, way, crossed)


def _drawn_on(flow: Flow, side: int, end: int) -> bool:
    """Whether the last weights that a branch passes are the projection that comes to a sum as its other side."""
    return next(iter(sorted(projections(flow, side), reverse=True)), None) == latest_weighty(flow).get(end)


def _chain(flow: Flow, side: int, way: Way, trunks: Trunks) -> Iterator[State]:
    """The values that the trunk came by to one side of a sum, nearest first."""
    if way == "projected":
        return projected(flow, side)
    return states(flow, side, trunks, gates=way == "gated", mixes=way != "light", norms=way == "light")


def _fits(flow: Flow, source: int, part: Part, way: Way) -> bool:
    """Whether a branch is one beside its trunk."""
    if not _carried(flow, source, part, way in ("projected", "gated")) or _filters(flow, part.region):
        return False
    return way != "projected" or _deep(flow, part.region)


def _put_back(flow: Flow, step: Step) -> bool:
    """Whether a sum is put back into the tensor from which its trunk was picked."""
    return any(len(reader.inputs) > 1 and chooses(reader) for reader in flow.readers(step.outputs[0]))


def _with_share(flow: Flow, scale: float | None, sign: float, end: int, source: int) -> float | None:
    """The factor on the trunk with what the branch itself adds of it: of x + a·(f(x) − x) it is 1 − a."""
    share = _share(flow, end, source)
    return scale if share == 0.0 else None if share is None or scale is None else scale + sign * share


def _share(flow: Flow, end: int, source: int) -> float | None:
    """The factor with which `source` is part of a sum; None where it is not constant."""
    known: dict[int, float | None] = {}
    todo = [end]
    while todo:
        chain = list(light_chain(flow, todo[-1]))
        found = next((link for link in chain if link.value == source), None)
        step = flow.made_by(chain[-1].value) if found is None else None
        if step is None or step.role is not Role.ADD or step.id < flow.producer.get(source, -1):
            known[todo.pop()] = 0.0 if found is None else found.factor(flow)
        elif missing := [v for v in step.inputs if v not in known]:
            todo += missing
        else:
            known[todo.pop()] = _total(step, known, chain[-1].factor(flow))
    return known[end]


def _total(step: Step, known: Mapping[int, float | None], outer: float | None) -> float | None:
    """What a sum has of something of which its operands have `known` shares, times a factor on the sum."""
    shares = [(known[v], operand_factor(step, v)) for v in step.inputs]
    if all(share == 0.0 for share, _ in shares):
        return 0.0
    total = sum(share * factor for share, factor in shares if share is not None)
    return None if outer is None or any(share is None for share, _ in shares) else outer * total


def _cut(
    flow: Flow, source: int, end: int, region: frozenset[int], writes: Mapping[int, Write]
) -> tuple[int, int | None, frozenset[int]] | None:
    """A branch does not lead through the add of another trunk. What comes by way of one is left out; where nothing else
    reaches the end, the branch reads that other trunk behind its last such add (as in a reversible network). None where
    the other's branch takes in what comes along here beside its own trunk: values kept for it are no trunk."""
    foreign: list[int] = []
    past = region
    while fresh := [i for i in past if i in writes and _elsewhere(flow, source, writes[i], past)]:
        foreign += fresh
        past = region_to(flow, source, end, region.difference(foreign))
    if not foreign or flow.producer.get(end) in past:
        return source, None, past
    if any(_takes_in(flow, source, writes[i].whole, region) for i in foreign):
        return None
    crossed = writes[max(foreign)]
    return crossed.output, crossed.step.id, region_to(flow, crossed.output, end, region)


def _elsewhere(flow: Flow, source: int, write: Write, region: frozenset[int]) -> bool:
    """Whether the trunk of a write does not come from `source`; a read shifted from outside is no write."""
    return enters(flow, write.trunk_input, source, region) and source not in mixture(flow, write.whole.end, Trunks())


def _takes_in(flow: Flow, value: int, part: Part, region: frozenset[int]) -> bool:
    """Whether what comes from `value`, by way of `region` or not, meets in a branch what was computed from the branch's
    own read of its trunk."""
    reached = region_to(flow, value, part.end, part.region | region)
    own = part.region - reached
    return any(v != value and flow.producer.get(v, -1) in own for i in reached for v in flow.steps[i].inputs)


def _uncross(flow: Flow, write: Write, writes: dict[int, Write]) -> None:
    """Where a branch reads another trunk, that trunk's branch before it reads this one, from the beginning on."""
    other = writes.get(-1 if write.crossed is None else write.crossed)
    if other is None or other.crossed is not None:
        return
    for link in light_chain(flow, write.trunk_input):
        maker = flow.made_by(link.value)
        if maker is not None and maker.id in writes and maker.id in other.whole.region:
            region = region_to(flow, link.value, other.whole.end, other.whole.region)
            part = make_part(flow, link.value, other.whole.end, region)
            if _carried(flow, link.value, part):
                parts = tuple(split(flow, link.value, part, writes))
                writes[other.step.id] = replace(
                    other, source=link.value, whole=part, parts=parts, over=(), crossed=maker.id
                )
            return


def _unite(flow: Flow, write: Write, trunks: Trunks) -> None:
    """What is added to two trunks is one branch, and reads the one from which it parts last."""
    same = [trunks.writes[i] for i in trunks.ends[write.whole.end]]
    reader = max(same, key=lambda w: flow.producer.get(w.source, -1))
    for other in same:
        if other.source != reader.source:
            shared = replace(other, source=reader.source, whole=reader.whole, parts=reader.parts, over=())
            trunks.writes[other.step.id] = shared


def _carried(flow: Flow, source: int, part: Part, strict: bool = False) -> bool:
    """Whether the branch carries its source on through heavy steps as a signal, not merely as the numbers of rows that
    it chooses (of a code book), nor, if `strict`, as no more than a gate on something else (the reset gate of a
    GRU)."""
    found = {source: False}  # the values that carry it on, and whether heavy steps were passed
    for step in (flow.steps[i] for i in sorted(part.region)):
        carrying = [found[v] for v in step.inputs if v in found]
        if strict and len(carrying) == 1 and steering(flow, step) in found:
            continue
        if carrying:
            passed = step.role in WEIGHTY or any(carrying)
            found.update((v, passed) for v in step.outputs if flow.floating(v))
    return found.get(part.end, False)


def _filters(flow: Flow, region: frozenset[int]) -> bool:
    """Whether a region is no more than a sliding mean of the trunk (which takes a series' trend off it): no norm, no
    weights, nothing learned."""
    steps = [flow.steps[i] for i in region]
    return not any(s.role is Role.NORM or s.parameters or (s.role in WEIGHTY and not slides(s.node)) for s in steps)


def _deep(flow: Flow, region: frozenset[int]) -> bool:
    """Whether weights follow behind a non-linear step: a single layer is no branch beside a projection."""
    first = next((i for i in sorted(region) if bends(flow, frozenset({i}))), None)
    return first is not None and any(i >= first for i in heavy(flow, region))


def _coupled(flow: Flow, *sides: int) -> bool:
    """Whether the factors on trunk and branch come from one sigmoid (g and 1 − g)."""
    gates = [gate_of(flow, side) for side in sides]
    return gates[0] is not None and gates[0] == gates[1]
