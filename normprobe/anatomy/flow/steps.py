"""The signal's way through the model: one step per operation on a signal, norms and attention as single steps."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from normprobe.anatomy.flow.levels import Levels
from normprobe.anatomy.flow.ops import Role, base
from normprobe.anatomy.flow.statics import Statics
from normprobe.capture.trace import Node, Ref, Trace

_PICKS = frozenset({"aten.index", "aten.index_select", "aten.gather"})


@dataclass(frozen=True)
class Group:
    """Nodes that make one step: a norm (`norm` numbers its site) or an attention operation (`call` is its call)."""

    role: Role
    nodes: frozenset[int]
    main: int
    call: int
    norm: int = -1


@dataclass(slots=True)
class Step:
    """One operation on a signal.

    `inputs` are the distinct signals it reads (the main one first), `statics` its other tensor arguments,
    `parameters` those that reach it without passing a signal, rows that a signal picks apart (of a product without any,
    the buffers), `node` the recorded operation (the last of a group).
    """

    id: int
    role: Role
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    statics: tuple[int, ...]
    parameters: tuple[str, ...]
    node: Node
    call: int
    group: Group | None = None


@dataclass
class Flow:
    """All steps in order of time, with who makes and who reads each value."""

    trace: Trace
    levels: Levels
    statics: Statics
    steps: list[Step] = field(default_factory=list)
    producer: dict[int, int] = field(default_factory=dict)
    consumers: defaultdict[int, list[int]] = field(default_factory=lambda: defaultdict(list))
    extra_shapes: dict[int, tuple[int, ...]] = field(default_factory=dict)
    outputs: dict[int, str] = field(default_factory=dict)
    pieces: dict[int, int] = field(default_factory=dict)  # tensors taken out of a concatenation as they went in
    memo: dict[Any, Any] = field(default_factory=dict)  # answers that places of one build share

    def made_by(self, value: int) -> Step | None:
        """The step that makes `value`; None for an input of the model."""
        index = self.producer.get(value)
        return None if index is None else self.steps[index]

    def readers(self, value: int) -> list[Step]:
        """The steps that read `value`."""
        return [self.steps[i] for i in self.consumers[value]] if value in self.consumers else []

    def shape(self, value: int) -> tuple[int, ...]:
        """Shape of `value`."""
        if value in self.extra_shapes:
            return self.extra_shapes[value]
        return self.trace.values[value].shape

    def floating(self, value: int) -> bool:
        """Whether `value` holds floating-point or complex numbers."""
        if value in self.extra_shapes:
            return True
        dtype = self.trace.values[value].dtype
        return dtype.is_floating_point or dtype.is_complex

    def path(self, step: Step) -> str:
        """Path of the module in whose forward the step ran."""
        return self.trace.calls[step.call].path


def extra(flow: Flow, node: Node, like: int | None = None) -> int:
    """A value of its own for what `node` computes on its way to its output, in its shape or that of `like`."""
    value = len(flow.trace.values) + len(flow.extra_shapes)
    flow.extra_shapes[value] = flow.shape(node.outputs[0] if like is None else like)
    return value


def append(
    flow: Flow,
    role: Role,
    inputs: tuple[int, ...],
    outputs: tuple[int, ...],
    node: Node,
    statics: tuple[int, ...] | None = None,
    group: Group | None = None,
) -> None:
    """Enter the next step."""
    if statics is None:
        statics = tuple(dict.fromkeys(v for v in node.inputs if not flow.levels.signal(v)))
    parameters = tuple(dict.fromkeys(p for v in statics for p in sorted(flow.levels.parameters(v))))
    parameters = tuple(dict.fromkeys((*parameters, *_picked(flow, role, inputs, node))))
    if role is Role.MATMUL:  # weights may be kept as buffers, as quantised ones are
        held = [v for v in statics if len(flow.shape(v)) > 1]
        if not any(flow.levels.parameters(v) for v in held):
            found = (b for v in held for b in sorted(flow.levels.buffers(v)))
            parameters = tuple(dict.fromkeys((*parameters, *found)))
    call = group.call if group else node.call
    step = Step(len(flow.steps), role, inputs, outputs, statics, parameters, node, call, group)
    flow.steps.append(step)
    for value in inputs:
        flow.consumers[value].append(step.id)
    for value in outputs:
        flow.producer[value] = step.id


def _picked(flow: Flow, role: Role, inputs: tuple[int, ...], node: Node) -> Iterator[str]:
    """The parameters that the factors of a product, or the rows beside the signal of a shift or scale, came from."""
    aside = (v for v in node.inputs if v not in inputs) if role in (Role.SHIFT, Role.SCALE) else ()
    for value in inputs if role is Role.MATMUL else aside:
        step = pick(flow, value)
        yield from step.parameters if step is not None else ()


def pick(flow: Flow, value: int) -> Step | None:
    """The step that picked a value out of parameters by an index (the weights of the experts that a router chose)."""
    while (step := flow.made_by(value)) is not None and step.role in (Role.MOVE, Role.SOURCE):
        if base(step.node.op) in _PICKS and ref(step.node.args[0]) not in step.inputs:
            return step
        if len(step.inputs) != 1:
            return None
        value = step.inputs[0]
    return None


def ref(argument: object) -> int:
    """The value behind a recorded argument, −1 if it is no tensor."""
    return argument.value if isinstance(argument, Ref) else -1
