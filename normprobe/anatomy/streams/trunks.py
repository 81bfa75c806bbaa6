"""Ways back along a trunk: through light steps, earlier residual adds, sums of states, gates and mixtures of copies."""

from __future__ import annotations

from collections.abc import Iterator

from normprobe.anatomy.flow.ops import LIGHT, Role
from normprobe.anatomy.flow.steps import Flow, Step
from normprobe.anatomy.flow.walk import Link, backward, light_chain, origin
from normprobe.anatomy.streams.copies import latest_stacked, mixed
from normprobe.anatomy.streams.parts import steering
from normprobe.anatomy.streams.writes import State, Trunks, Write


def states(
    flow: Flow, value: int, trunks: Trunks, gates: bool = False, mixes: bool = False, norms: bool = False
) -> Iterator[State]:
    """`value` and the earlier states of the trunk that it lies on, with the writes in between, nearest first.

    Args:
        flow: the flow.
        value: where to start.
        trunks: the adds known so far.
        gates: whether a product with a gate leads on along the trunk.
        mixes, norms: whether a mixture of parallel copies, a norm on a residual add leads on.
    """
    over: tuple[int, ...] = ()
    outer: tuple[Step, ...] | None = ()
    while True:
        link, taken = Link(value), value
        for inner in light_chain(flow, value):
            taken, link = link.value, Link(inner.value, None if outer is None else (*outer, *(inner.scales or ())))
            yield link, over
        maker = flow.made_by(link.value)
        if maker is None:
            return
        outer = link.scales
        if maker.id in trunks.writes:
            over, value = (*over, maker.id), trunks.writes[maker.id].trunk_input
            continue
        summed = norms and maker.role is Role.NORM and origin(flow, maker.inputs[0]) in trunks.writes
        on = maker.inputs[0] if summed else _moved(flow, maker, taken, trunks) if maker.role is Role.MOVE else None
        if on is None:
            on, outer = _unusual(flow, maker, trunks, gates, mixes), None
        if on is None:
            return
        value = on


def _moved(flow: Flow, step: Step, taken: int, trunks: Trunks) -> int | None:
    """The input that a move goes on from, on the way to what was `taken` out of what it makes."""
    return trunks.pieces[taken] if taken in trunks.pieces else trunks.kept(flow, step)


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


def excited(flow: Flow, step: Step) -> int | None:
    """The operand of a product with a factor that was computed from it (squeeze and excitation of the trunk itself)."""
    factor = steering(flow, step)
    value = gated(step, factor)
    if value is None or factor is None:
        return None
    made = flow.producer.get(value, -1)
    earlier = backward(flow, factor, lambda _, v: flow.producer.get(v, -1) < made)
    return value if any(v == value for v, _ in earlier) else None


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
    steps, norms, activations, sums of states, weights that draw states into one, mixtures of copies and its own
    projection or gate, gates that the trunk makes for itself."""
    passes = LIGHT | {Role.NORM, Role.ACT}
    value, gates = write.source if write.way == "projected" else write.trunk_input, write.way == "gated"
    while (step := flow.made_by(value)) is not None:
        yield step
        if step.id in trunks.writes:
            return
        earlier = trunks.merges.get(step.id, trunks.drawn.get(step.id))
        earlier = mixed(flow, step) if earlier is None else earlier
        if earlier is not None and step.id not in trunks.merges and step.id not in trunks.drawn:
            earlier = latest_stacked(flow, earlier)
        gates = gates or step.id in trunks.merges
        if earlier is None:
            earlier = gated(step, steering(flow, step)) if gates else excited(flow, step)
        earlier = trunks.pieces.get(value, earlier)
        if earlier is None and step.role in passes:
            earlier = step.inputs[0] if step.role is Role.NORM else trunks.kept(flow, step)
        if earlier is None:
            return
        value = earlier


def previous(flow: Flow, write: Write, trunks: Trunks) -> Write | None:
    """The write that the trunk of `write` comes from; None at the start of a stream."""
    return next((trunks.writes[s.id] for s in behind(flow, write, trunks) if s.id in trunks.writes), None)
