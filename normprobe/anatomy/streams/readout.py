"""The way from a stream's last write to the model's output: final norm, other readers, head."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from torch import nn

from normprobe.anatomy.flow.ops import CAPS, LIGHT, WEIGHTY, Role, base
from normprobe.anatomy.flow.steps import Flow, Step
from normprobe.anatomy.flow.walk import backward, constant_factor, first_readers, light_chain, origin, reached
from normprobe.anatomy.streams.parts import bends, region_to
from normprobe.records import Head

_OPEN = LIGHT | {Role.POOL}
_ALL_BUT_NORMS = frozenset(Role) - {Role.NORM}
_NEAR = frozenset(Role) - WEIGHTY - {Role.NORM}  # what the stream itself may pass on its way to its final norm


@dataclass(frozen=True)
class HeadWay:
    """The first returned tensor (the logits where there are any), the ids of the steps it was computed from, and the
    ids of the steps inside cross-attention branches of other streams. `later` says that another returned tensor stands
    for it, since the first is read off an earlier state of the stream (early exits, a head for each stage)."""

    value: int
    ancestors: frozenset[int]
    foreign: frozenset[int]
    later: bool = False


@dataclass(frozen=True)
class Readout:
    """How a stream is read after its last write.

    Attributes:
        direct: `norm` where it is the only reader on the way to the head, without weights in between.
        norm: the first norm that every way to the head passes, else the first ones of ways that pass different norms
            (several heads with a norm each); one way to it has no weights. Empty if there is none.
        far: the same where weights come before it on all ways.
        bent: whether something that is not linear stands between the end and `far`.
        raw_way: the first reader of a way to the head, or into another stream's cross-attention, that passes no norm;
            of any way where all of them pass one.
        pooled: whether the first reader of every way that passes no norm reads a pool of the stream.
        beside: norms through which another returned tensor reads the stream, where the stream is returned raw first.
        returned: whether the head is the raw stream itself, pooled perhaps.
        raw_readers: readers of the raw stream that lead elsewhere, returned tensors included.
    """

    direct: tuple[Step, ...]
    norm: tuple[Step, ...]
    far: tuple[Step, ...]
    bent: bool
    raw_way: str | None
    pooled: bool
    beside: tuple[Step, ...]
    returned: bool
    raw_readers: tuple[str, ...]


def read_out(flow: Flow, value: int, head: HeadWay) -> Readout:
    """How the stream that ends in `value` (the output of its last write) is read on the way to the head.

    Another stream's cross-attention is the end of the way only where no other way leads on (as from an encoder).
    """
    ends = replace(head, ancestors=head.ancestors - head.foreign, foreign=frozenset())
    if _way(flow, value, ends) is not None:
        head = replace(head, foreign=frozenset())
    start = flow.producer.get(value, -1)
    norms = [flow.steps[i] for i in sorted(head.ancestors) if i > start and flow.steps[i].role is Role.NORM]
    avoiding = _way(flow, value, head, norms)
    raw_way = avoiding or _way(flow, value, head)
    pooled = avoiding is not None and _way(flow, value, head, norms, pools=False) is None
    norm: tuple[Step, ...] = ()
    far: tuple[Step, ...] = ()
    if raw_way is not None and avoiding is None:
        near = reached(flow, value, _NEAR)
        narrow = _passed_by_all(flow, value, head)
        shared = [n for n in norms if n.id in narrow]
        passed = shared or [s for s in first_readers(flow, value, None, _ALL_BUT_NORMS) if s in norms]
        norm = tuple(n for n in passed if not near.isdisjoint(n.inputs))
        norm, far = norm[:1] if shared else norm, () if norm else tuple(passed[:1])
    readers = [s for s in first_readers(flow, value, None, _OPEN) if s.id in head.ancestors]
    direct = norm if readers and all(s in norm for s in readers) else ()
    returned = head.value in _light_outputs(flow, value)
    beside = _beside(flow, value) if returned and not norm else ()
    others = _elsewhere(flow, value, head.value, head.ancestors)
    return Readout(direct, norm, far, _bent(flow, value, far), raw_way, pooled, beside, returned, others)


def _bent(flow: Flow, value: int, far: Sequence[Step]) -> bool:
    """Whether something that is not linear stands between a value and a norm."""
    return any(bends(flow, region_to(flow, value, norm.inputs[0], range(norm.id))) for norm in far)


def _beside(flow: Flow, value: int) -> tuple[Step, ...]:
    """Norms that read a value and lead to a returned tensor."""
    every = frozenset(Role)
    norms = [s for s in first_readers(flow, value, None, _OPEN) if s.role is Role.NORM]
    return tuple(n for n in norms if flow.outputs.keys() & set(reached(flow, n.outputs[0], every)))


def _way(flow: Flow, value: int, head: HeadWay, barriers: Sequence[Step] = (), pools: bool = True) -> str | None:
    """The first reader on some way from `value` to the head, or into another stream's cross-attention, that avoids
    `barriers`, and without `pools` reads no pool of the value; None if there is no such way."""
    todo: list[tuple[int, str | None]] = [(value, None)]
    seen, barred = {value}, {barrier.id for barrier in barriers}
    while todo:
        current, reader = todo.pop()
        if current == head.value:
            return reader or flow.outputs.get(head.value, "output")
        for step in flow.readers(current):
            if step.id not in head.ancestors or step.id in barred:
                continue
            if reader is None and step.role is Role.POOL and not pools:
                continue
            first = reader if reader is not None or step.role in _OPEN else flow.path(step)
            if step.id in head.foreign and step.role not in _OPEN and step.role is not Role.NORM:
                return first
            fresh = [v for v in step.outputs if v not in seen]
            seen.update(fresh)
            todo += [(v, first) for v in fresh]
    return None


def _passed_by_all(flow: Flow, value: int, head: HeadWay) -> set[int]:
    """Ids of the steps that every way passes which `_way` goes: nothing made before such a step is read behind it."""
    live, furthest, found = {value}, _last_read(flow, value, head), set[int]()
    for index in sorted(i for i in head.ancestors if i > flow.producer.get(value, -1)):
        step = flow.steps[index]
        if live.isdisjoint(step.inputs):
            continue
        if furthest <= index:
            found.add(index)
        if index in head.foreign and step.role not in _OPEN and step.role is not Role.NORM:  # a way ends here
            furthest = len(flow.steps)
            continue
        live.update(step.outputs)
        furthest = max([furthest, *(_last_read(flow, v, head) for v in step.outputs)])
    return found


def _last_read(flow: Flow, value: int, head: HeadWay) -> int:
    """The id of the last step on ways to the head that reads `value`; one behind all for what the head itself is."""
    if value == head.value:
        return len(flow.steps)
    return max((s.id for s in flow.readers(value) if s.id in head.ancestors), default=-1)


def _elsewhere(flow: Flow, value: int, head_value: int, ancestors: frozenset[int]) -> tuple[str, ...]:
    steps = first_readers(flow, value, None, _OPEN)
    off_way = [flow.path(s) for s in steps if s.role is not Role.NORM and s.id not in ancestors]
    returned = [flow.outputs[v] for v in _light_outputs(flow, value) if v in flow.outputs and v != head_value]
    return tuple(dict.fromkeys((*off_way, *returned)))


def steps_behind(flow: Flow, value: int) -> frozenset[int]:
    """Ids of all steps that `value` was computed from."""
    key = ("steps behind", value)
    if key not in flow.memo:
        steps = (s for _, s in backward(flow, value, lambda step, v: step is None) if s is not None)
        flow.memo[key] = frozenset(s.id for s in steps)
    found: frozenset[int] = flow.memo[key]
    return found


def way_behind(flow: Flow, head: HeadWay, writes: Sequence[int]) -> HeadWay:
    """The way to the head; where that was not computed from the last of the steps `writes`, the way to the first
    returned signal that was."""
    if writes[-1] in head.ancestors:
        return head
    for value in _returned(flow):
        ancestors = steps_behind(flow, value)
        if writes[-1] in ancestors:
            return HeadWay(value, ancestors, head.foreign, later=any(write in head.ancestors for write in writes))
    return head


def _returned(flow: Flow) -> list[int]:
    """The returned signals; learned tokens are none, and a loss is one where nothing else is returned."""
    levels = flow.levels
    returned = [v for _, v in flow.trace.outputs if levels.signal(v) and not levels.learned(v)]
    return [v for v in returned if flow.shape(v)] or returned


def head_value(flow: Flow, model: nn.Module) -> int | None:
    """The first returned signal, or the logits computed from it: another returned signal that a product with a weight
    made. A loss, a count or learned tokens returned first are not meant. None where no signal is returned."""
    signals = _returned(flow)
    if not signals or read_head(flow, signals[0], model) is not None:
        return next(iter(signals), None)
    source = flow.producer.get(signals[0])
    for value in signals[1:]:
        if source in steps_behind(flow, value) and read_head(flow, value, model) is not None:
            return value
    return signals[0]


def read_head(flow: Flow, value: int, model: nn.Module) -> Head | None:
    """The last product with a weight before the output, with soft cap and constants around it; None without one."""
    multiplier: float | None = 1.0
    softcap: float | None = None
    while (step := flow.made_by(value)) is not None:
        if step.role is Role.MATMUL:
            name = next((p for p in step.parameters if _is_matrix(_shape(flow, p))), None)
            if name is None:
                return None
            path, tied = _names(model, name, flow.path(step))
            if multiplier is not None:  # of c·tanh(m·x / c) it is m
                multiplier = round(multiplier * _input_factor(flow, step) * (softcap or 1.0), 12)
            return Head(path=path, logit_multiplier=multiplier, softcap=softcap, tied_to=tied)
        if step.role is Role.ADD:
            whole = _updated(flow, step)
            if whole is None:
                return None
            value = whole
            continue
        if base(step.node.op) in CAPS and multiplier != 1.0:  # c·tanh(x / c); a bare one is none
            softcap, multiplier = multiplier, 1.0
        elif step.role not in LIGHT:
            return None
        if step.role is Role.SCALE:
            multiplier = _times(flow, step, multiplier)
        value = step.inputs[0]
    return None


def _is_matrix(shape: tuple[int, ...]) -> bool:
    """Whether a weight is a matrix: a kernel over one place is."""
    return len(shape) > 1 and all(size == 1 for size in shape[2:])


def _updated(flow: Flow, step: Step) -> int | None:
    """The operand of a sum that is one product with a weight, where the other is several products one after another of
    the same input: the weight and an update of low rank. None where the sum is of another kind."""
    ways = [_products(flow, value) for value in step.inputs]
    for value, one, several in zip(step.inputs, ways, ways[::-1], strict=True):
        if one and one[0] in several[1:]:
            return value
    return None


def _products(flow: Flow, value: int) -> list[int]:
    """Where the inputs of the products with weights come from that `value` is made by, the last product first."""
    found: list[int] = []
    while (step := flow.made_by(value)) is not None:
        if step.role is Role.MATMUL and step.parameters:
            found.append(origin(flow, step.inputs[0]))
        elif step.role not in LIGHT:
            break
        if len(step.inputs) != 1:
            break
        value = step.inputs[0]
    return found


def unread_head(flow: Flow, value: int) -> str | None:
    """Why a returned tensor that an operation with weights of its own seems to make has no head; None where nothing
    of that kind makes it."""
    *_, last = light_chain(flow, value)
    step = flow.made_by(last.value)
    if step is None or step.role not in (Role.HEAVY, Role.MATMUL) or step.parameters or len(step.inputs) != 1:
        return None
    return f"{step.node.op} makes the output, and what it holds is not seen as parameters"


def _input_factor(flow: Flow, product: Step) -> float:
    """The constant factor on what the head reads, back to the first step that is none."""
    factors = [link.factor(flow) for link in light_chain(flow, product.inputs[0])]
    return next(f for f in reversed(factors) if f is not None)


def _names(model: nn.Module, name: str, module: str) -> tuple[str, str | None]:
    """The head's parameter by its name in the module that uses it, and another name of the same tensor, if any."""
    tensor = dict(model.named_parameters(remove_duplicate=False)).get(name)
    if tensor is None:  # a weight kept as a buffer
        return name, None
    names = [n for n, p in model.named_parameters(remove_duplicate=False) if p is tensor]
    own = next((n for n in names if n.startswith(module + ".")), name)
    return own, next((n for n in names if n != own), None)


def _times(flow: Flow, step: Step, multiplier: float | None) -> float | None:
    constant = constant_factor(flow, step)
    return None if constant is None or multiplier is None else multiplier * constant


def _shape(flow: Flow, parameter: str) -> tuple[int, ...]:
    for node in flow.trace.nodes:
        if node.op in ("parameter", "buffer") and node.name == parameter:
            return flow.trace.values[node.outputs[0]].shape
    return ()


def _light_outputs(flow: Flow, value: int) -> set[int]:
    """`value` and everything made from it by light steps."""
    return reached(flow, value, _OPEN)
