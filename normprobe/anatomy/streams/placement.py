"""Where the norms of a branch sit: before it, behind it, on the sum, or nowhere."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from normprobe.anatomy.flow.ops import LIGHT, WEIGHTY, Role
from normprobe.anatomy.flow.steps import Flow, Step
from normprobe.anatomy.flow.walk import first_readers, last_makers, light_chain, pools
from normprobe.anatomy.streams.copies import mixing
from normprobe.anatomy.streams.parts import Part, bends, region_to
from normprobe.anatomy.streams.writes import Write
from normprobe.records.anatomy import Placement

_OPEN = frozenset(Role) - WEIGHTY - {Role.NORM}  # everything between the trunk and the first norm or weights
_AFTER_NORM = LIGHT | {Role.POOL}  # x·sigmoid(x) written out is a gate


@dataclass(frozen=True)
class Norms:
    """The norm steps around one branch.

    Attributes:
        before: the first norms on the ways from the trunk to weights, if all ways pass one.
        behind: the norms between the last weights and the add, the last first, if all ways pass one.
        on_sum: the norms that read the add, if everything reads it through one.
        activated: whether an activation is the first thing behind `before`.
        act_on_sum: whether everything reads the add through an activation.
    """

    before: tuple[Step, ...]
    behind: tuple[Step, ...]
    on_sum: tuple[Step, ...]
    activated: bool = False
    act_on_sum: bool = False


def branch_norms(flow: Flow, write: Write, part: Part, following: Write | None) -> Norms:
    """The norms that every way into `part`, out of it, and on from its add passes.

    Args:
        flow: the flow.
        write: the residual add.
        part: the branch.
        following: the next write of the stream; None for the last write.
    """
    before = _all_norms(first_readers(flow, write.source, part.core, _OPEN, mixing(flow, part.core)))
    readers = first_readers(flow, write.output, None, LIGHT)
    on_sum = _all_norms(readers)
    if on_sum and following is not None and not _on_stream(flow, on_sum[0], following):
        on_sum = ()
    activated = bool(before) and all(_only_activations(flow, norm, part.region) for norm in before)
    if not before and write.way == "projected":
        before, activated = _shared(flow, write)
    act_on_sum = bool(readers) and all(s.role is Role.ACT for s in readers)
    return Norms(before, _behind(flow, part), on_sum, activated, act_on_sum)


def _shared(flow: Flow, write: Write) -> tuple[tuple[Step, ...], bool]:
    """The norm that a projected shortcut and its branch both read, and whether through an activation; it must lie in
    the module that adds, else it is the end of what came before."""
    value, activated = write.source, False
    while (step := flow.made_by(value)) is not None and len(step.inputs) == 1:
        if step.role is Role.NORM:
            own = flow.path(step).startswith(flow.path(write.step) + ".")
            return ((step,), activated) if own else ((), False)
        if step.role is not Role.ACT and step.role not in LIGHT and not pools(step):
            break
        activated = activated or step.role is Role.ACT
        value = step.inputs[0]
    return (), False


def _behind(flow: Flow, part: Part) -> tuple[Step, ...]:
    """The norms between the last weights and the branch's end, also those behind sums of normed parts."""
    found: list[Step] = []
    layer = _all_norms(last_makers(flow, part.end, part.core, _OPEN))
    while layer:
        found += reversed(layer)
        earlier = [s for norm in layer for s in last_makers(flow, norm.inputs[0], part.core, _OPEN)]
        layer = tuple(s for s in earlier if s.role is Role.NORM and s not in found)
    return tuple(found)


def norms_between(flow: Flow, source: int, part: Part) -> Iterator[Step]:
    """The norms that stand before the second layer of a branch of several layers in a row (attention, then an MLP).

    All that comes from `source` passes them, from the last weights of one layer to the first of the next, and each
    layer is a non-linear one between weights, as a branch of its own would be. Where neither attends, they are one
    MLP of many layers.
    """
    for norm in (flow.steps[i] for i in sorted(part.core) if flow.steps[i].role is Role.NORM):
        written = last_makers(flow, norm.inputs[0], part.core, LIGHT)
        read = [s for v in norm.outputs for s in first_readers(flow, v, part.core, LIGHT)]
        if not (written and read and all(_weighted(s) for s in (*written, *read))):
            continue
        if flow.producer.get(part.end) in region_to(flow, source, part.end, part.core - {norm.id}):
            continue
        first = region_to(flow, source, norm.inputs[0], part.core)
        last = part.core - first - {norm.id}
        if _attends(flow, part.core) and _layer(flow, first) and _layer(flow, last):
            yield norm


def _attends(flow: Flow, region: frozenset[int]) -> bool:
    """Whether a region may do more than products and pointwise functions: it attends, scans or is not known."""
    return any(flow.steps[i].role in (Role.ATTENTION, Role.SOFTMAX, Role.HEAVY) for i in region)


def _weighted(step: Step) -> bool:
    return step.role is Role.MATMUL and bool(step.parameters)


def _layer(flow: Flow, region: frozenset[int]) -> bool:
    """Whether weights lie before and behind something that is not linear."""
    own = [i for i in region if _weighted(flow.steps[i])]
    return bool(own) and any(min(own) < i < max(own) and bends(flow, frozenset({i})) for i in region)


def placement(norms: Norms, post: bool, skip_scale: float | None) -> Placement:
    """The field's word for the placement; `post` says whether the norm on the sum belongs to the stream."""
    if post:
        return "deepnorm" if skip_scale is None or abs(skip_scale - 1) > 1e-6 else "post"
    if norms.before and norms.behind:
        return "sandwich"
    if norms.before:
        return "preact" if norms.activated else "pre"
    if norms.behind:
        return "postact" if norms.act_on_sum else "output"
    return "none"


def _all_norms(steps: list[Step]) -> tuple[Step, ...]:
    """All of `steps` if all of them are norms, else none."""
    return tuple(steps) if all(s.role is Role.NORM for s in steps) else ()


def _on_stream(flow: Flow, norm: Step, following: Write) -> bool:
    """Whether the trunk of the next write is the output of `norm`, and does not have it as a norm of its own."""
    own = following.way == "projected" and norm in _shared(flow, following)[0]
    trunk = following.trunk_input if following.way == "light" else following.source
    return not own and any(value in norm.outputs for value in _back(flow, trunk))


def _back(flow: Flow, value: int) -> Iterator[int]:
    """`value` and the values that it came from by light steps and norms."""
    while True:
        for link in light_chain(flow, value):
            yield link.value
        step = flow.made_by(link.value)
        if step is None or step.role is not Role.NORM:
            return
        value = step.inputs[0]


def _only_activations(flow: Flow, norm: Step, region: frozenset[int]) -> bool:
    """Whether an activation is the first thing that every reader of the norm does; a factor or summand that does not
    come from the norm (the scale and shift of a conditioned norm) is passed."""
    own, acted = set(norm.outputs), set[int]()  # from the norm alone, and behind an activation of it
    for step in (flow.steps[i] for i in sorted(region) if i > norm.id):
        if not any(v in own for v in step.inputs):
            continue
        foreign = any(v not in own and v not in acted for v in step.inputs)
        if step.role in _AFTER_NORM or (step.role in (Role.GATE, Role.ADD) and foreign):
            own.update(step.outputs)
        elif step.role in (Role.ACT, Role.GATE):
            acted.update(step.outputs)
        else:
            return False
    return bool(acted)
