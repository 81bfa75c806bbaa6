"""Ways back along a trunk: through light steps, earlier residual adds, shortcuts, gates and mixtures of copies."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal

import torch

from normprobe.anatomy.flow.ops import LIGHT, Role, base
from normprobe.anatomy.flow.replay import replay
from normprobe.anatomy.flow.steps import Flow, Step
from normprobe.anatomy.flow.walk import Link, argument_value, light_chain, origin, pools
from normprobe.anatomy.streams.moves import kept
from normprobe.anatomy.streams.parts import Part, steering

MOST_COPIES = 16
_JOINS = frozenset({"aten.stack", "aten.cat"})
Way = Literal["light", "projected", "gated", "mixed"]
_State = tuple[Link, tuple[int, ...]]


@dataclass(frozen=True)
class Write:
    """One residual add.

    Attributes:
        step: the add.
        trunk: which of its inputs is the trunk, 0 or 1.
        source: the value from which the branch reads: where it parts from the trunk, or the state of another trunk.
        skip_scale: constant factor on the trunk; None where it is not constant.
        whole: everything between `source` and this add.
        parts: the independent branches that `whole` is the sum of, in order of time (mostly `whole` alone).
        over: earlier residual adds that lie between `source` and this add: it is parallel to them.
        way: how the trunk comes to the add: by light steps alone, or by a projection or pooling, a gate, a mixture too.
        crossed: the add of another trunk from which the branch reads.
    """

    step: Step
    trunk: int
    source: int
    skip_scale: float | None
    whole: Part
    parts: tuple[Part, ...]
    over: tuple[int, ...] = ()
    way: Way = "light"
    crossed: int | None = None

    @property
    def trunk_input(self) -> int:
        """The stream as it comes to the add."""
        return self.step.inputs[self.trunk]

    @property
    def output(self) -> int:
        """The stream after this write."""
        return self.step.outputs[0]


@dataclass
class Trunks:
    """What is known of the trunks so far: the residual adds; the sums of two states of one trunk with the later state
    (a long skip, an average over depth); and the choices between states of one trunk, element by element, with the
    latest state (tokens that skip a block, rows written in place)."""

    writes: dict[int, Write] = field(default_factory=dict)
    merges: dict[int, int] = field(default_factory=dict)
    choices: dict[int, int] = field(default_factory=dict)

    def kept(self, flow: Flow, step: Step) -> int | None:
        """The input that a step goes on from along the trunk."""
        return self.choices[step.id] if step.id in self.choices else kept(flow, step)


def states(
    flow: Flow, value: int, trunks: Trunks, gates: bool = False, mixes: bool = False, norms: bool = False
) -> Iterator[_State]:
    """`value` and the earlier states of the trunk that it lies on, with the writes in between, nearest first.

    Args:
        flow: the flow.
        value: where to start.
        trunks: the adds known so far.
        gates: whether a product with a gate leads on along the trunk.
        mixes, norms: whether a mixture of parallel copies, a norm on a residual add leads on.
    """
    over: tuple[int, ...] = ()
    outer: float | None = 1.0
    while True:
        link = Link(value)
        for link in light_chain(flow, value):
            factor = None if outer is None or link.factor is None else outer * link.factor
            yield Link(link.value, factor), over
        maker = flow.made_by(link.value)
        if maker is None:
            return
        outer = None if outer is None or link.factor is None else outer * link.factor
        if maker.id in trunks.writes:
            over, value = (*over, maker.id), trunks.writes[maker.id].trunk_input
            continue
        summed = norms and maker.role is Role.NORM and origin(flow, maker.inputs[0]) in trunks.writes
        on = maker.inputs[0] if summed else trunks.kept(flow, maker) if maker.role is Role.MOVE else None
        if on is None:
            on, outer = _unusual(flow, maker, trunks, gates, mixes), None
        if on is None:
            return
        value = on


def _unusual(flow: Flow, step: Step, trunks: Trunks, gates: bool, mixes: bool) -> int | None:
    """The earlier state that a sum of states, a mixture of copies or a product with a gate goes on from."""
    on = trunks.merges.get(step.id)
    if on is None and mixes:
        on = mixed(flow, step)
    if on is None and gates:
        on = gated(step, steering(flow, step))
    return on


def gated(step: Step, factor: int | None) -> int | None:
    """The operand of a product that is not its factor."""
    return None if factor is None else next(v for v in step.inputs if v != factor)


def mixed(flow: Flow, step: Step) -> int | None:
    """The operand of a product that only mixes the few parallel copies held on one of its axes: no feature meets
    another. None where the step is no such product."""
    if base(step.node.op) not in ("aten.bmm", "aten.mm"):
        return None
    left, right = (argument_value(a) for a in step.node.args[:2])
    for copies, weights, axis in ((right, left, -2), (left, right, -1)):
        if copies is None or weights is None or copies not in step.inputs or copies == weights:
            continue
        sizes, copied = flow.shape(weights), flow.shape(copies)[axis]
        fresh = sizes[-2] if axis == -2 else sizes[-1]
        few = 1 < copied <= MOST_COPIES and fresh <= 2 * copied
        if few and math.prod(sizes) < math.prod(flow.shape(copies)) and _keeps_features(flow, copies, axis):
            return copies
    return None


def copies(flow: Flow, step: Step) -> int:
    """How many copies a mixing product mixes."""
    weights = argument_value(step.node.args[0])
    return flow.shape(weights)[-1] if weights is not None else 1


def _keeps_features(flow: Flow, value: int, axis: int) -> bool:
    """Whether the last axis of the tensor that `value` is a view of does not lie on `axis`."""
    moves: list[tuple[Step, int]] = []
    while (step := flow.made_by(value)) is not None and step.role is Role.MOVE and len(step.inputs) == 1:
        if base(step.node.op) in _JOINS:
            break
        moves.append((step, step.outputs.index(value)))
        value = step.inputs[0]
    shape = flow.shape(value)
    index: torch.Tensor | None = torch.arange(shape[-1]).expand(shape).contiguous()
    for step, place in reversed(moves):
        index = None if index is None else replay(flow, step.node, index, place)
    return index is not None and not bool((index.diff(dim=axis) != 0).any())


def mixing(flow: Flow, region: frozenset[int]) -> frozenset[int]:
    """The steps of a branch that only mix parallel copies, as it reads several streams as one."""
    found = {i: mixed(flow, flow.steps[i]) for i in region if flow.steps[i].role is Role.MATMUL}
    return frozenset(i for i, value in found.items() if value is not None and _gathers(flow, flow.steps[i], value))


def _gathers(flow: Flow, step: Step, value: int) -> bool:
    return math.prod(flow.shape(step.outputs[0])) < math.prod(flow.shape(value))


def shortcut(flow: Flow, value: int) -> Iterator[Step]:
    """The steps behind a shortcut over views, norms, poolings and projections."""
    while (step := flow.made_by(value)) is not None:
        passed = step.role in LIGHT or pools(step) or (step.role is Role.MATMUL and step.parameters)
        if step.role is not Role.NORM and not (passed and len(step.inputs) == 1):
            return
        yield step
        value = step.inputs[0]


def projected(flow: Flow, value: int) -> Iterator[_State]:
    """The chain behind a shortcut's projections, its poolings and the norms around them; empty without any."""
    changed = False
    for step in shortcut(flow, value):
        changed = changed or step.role is Role.MATMUL or pools(step)
        if changed:
            yield Link(step.inputs[0], None), ()


def projections(flow: Flow, value: int) -> frozenset[int]:
    """The ids of the projections on a shortcut."""
    return frozenset(s.id for s in shortcut(flow, value) if s.role is Role.MATMUL)


def joins(flow: Flow, step: Step, trunks: Trunks) -> int | None:
    """The later operand of a sum of two states of one trunk, the earlier one normed or not; None where the sum is of
    another kind."""
    for later, earlier in (step.inputs, step.inputs[::-1]):
        old = mixture(flow, earlier, trunks)
        first = min(flow.producer.get(v, -1) for v in old)
        near = {link.value for link, _ in states(flow, later, Trunks())}
        near -= _scaled(flow, later) & _scaled(flow, earlier)
        for gates in (False, True):
            for link, over in states(flow, later, trunks, gates, mixes=True):
                if link.value in old:
                    return None if link.value in near or (gates and not over) else later
                if flow.producer.get(link.value, -1) <= first:
                    break
    return None


def mixture(flow: Flow, value: int, trunks: Trunks) -> set[int]:
    """The states that `value` comes from by light steps, norms and sums of states, without an add of a branch."""
    found = {value}
    while (step := flow.made_by(value)) is not None:
        if step.id in trunks.merges:
            value = trunks.merges[step.id]
        elif step.role is Role.NORM or (step.role in LIGHT and len(step.inputs) == 1):
            value = step.inputs[0]
        else:
            break
        found.add(value)
    return found


def _scaled(flow: Flow, value: int) -> set[int]:
    """`value` and what it is a multiple of."""
    found = {value}
    while (step := flow.made_by(value)) is not None and step.role is Role.SCALE:
        value = step.inputs[0]
        found.add(value)
    return found


def behind(flow: Flow, write: Write, trunks: Trunks) -> Iterator[Step]:
    """The steps that the trunk comes to `write` by, latest first, up to the write before, which is the last: light
    steps, norms, activations, sums of states, mixtures of copies and its own projection or gate."""
    passes = LIGHT | {Role.NORM, Role.ACT}
    value, gates = write.source if write.way == "projected" else write.trunk_input, write.way == "gated"
    while (step := flow.made_by(value)) is not None:
        yield step
        if step.id in trunks.writes:
            return
        earlier = trunks.merges.get(step.id)
        earlier = mixed(flow, step) if earlier is None else earlier
        if earlier is not None and step.id not in trunks.merges:
            earlier = latest_stacked(flow, earlier)
        gates = gates or step.id in trunks.merges
        if earlier is None and gates:
            earlier = gated(step, steering(flow, step))
        if earlier is None and step.role in passes:
            earlier = step.inputs[0] if step.role is Role.NORM else trunks.kept(flow, step)
        if earlier is None:
            return
        value = earlier


def latest_stacked(flow: Flow, value: int) -> int:
    """The last of the states that a mixture over depth was stacked from; `value` itself where it is no stack."""
    *_, link = light_chain(flow, value)
    maker = flow.made_by(link.value)
    if maker is None or base(maker.node.op) != "aten.stack":
        return value
    return max(maker.inputs, key=lambda v: flow.producer.get(v, -1))


def previous(flow: Flow, write: Write, trunks: Trunks) -> Write | None:
    """The write that the trunk of `write` comes from; None at the start of a stream."""
    return next((trunks.writes[s.id] for s in behind(flow, write, trunks) if s.id in trunks.writes), None)
