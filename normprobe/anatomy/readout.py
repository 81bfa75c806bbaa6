"""The way from a stream's last write to the model's output: final norm, other readers, head."""

from __future__ import annotations

from dataclasses import dataclass

from normprobe.anatomy.adds import Write
from normprobe.anatomy.flow import Flow, Step
from normprobe.anatomy.ops import LIGHT, Role
from normprobe.anatomy.walk import backward, constant_factor, first_readers
from normprobe.records import Head

_OPEN = LIGHT | {Role.POOL}


@dataclass(frozen=True)
class Readout:
    """Norm steps that all ways from the last write to the head pass first, and the raw readers on and off those ways.

    `norms` is empty where some way reaches the head without a norm; `on_way` then names the reader.
    `reaches_head` is False where the stream does not lead to the first output at all.
    """

    norms: tuple[Step, ...]
    raw_readers: tuple[str, ...]
    on_way: str | None
    reaches_head: bool


def read_out(flow: Flow, write: Write, head_value: int, ancestors: frozenset[int]) -> Readout:
    """How the stream that ends in `write` is read.

    Args:
        flow: the flow.
        write: the last write of the stream.
        head_value: the first returned tensor (the logits where there are any).
        ancestors: ids of all steps that `head_value` was computed from.
    """
    steps = first_readers(flow, write.output, None, _OPEN)
    norms = tuple(s for s in steps if s.role is Role.NORM)
    raw = [s for s in steps if s.role is not Role.NORM]
    on_way = next((_name(flow, s) for s in raw if s.id in ancestors), None)
    if on_way is None and head_value in _light_outputs(flow, write.output):
        on_way = flow.outputs.get(head_value, "output")
    off_way = tuple(_name(flow, s) for s in raw if s.id not in ancestors)
    returned = tuple(flow.outputs[v] for v in _light_outputs(flow, write.output) if v in flow.outputs)
    reading = tuple(s for s in norms if s.id in ancestors)
    reaches = bool(reading) or on_way is not None
    return Readout(
        reading if on_way is None else (), (*off_way, *_other(returned, on_way)), on_way, reaches
    )


def steps_behind(flow: Flow, value: int) -> frozenset[int]:
    """Ids of all steps that `value` was computed from."""
    return frozenset(s.id for _, s in backward(flow, value, lambda step, v: step is None) if s is not None)


def read_head(flow: Flow, value: int) -> Head | None:
    """The last product with a weight before the output, with constants and soft cap after it; None if there is none."""
    multiplier: float | None = 1.0
    softcap: float | None = None
    while (step := flow.made_by(value)) is not None:
        if step.role is Role.MATMUL:
            name = next((p for p in step.parameters if len(_shape(flow, p)) == 2), None)
            if name is None:
                return None
            return Head(path=name, logit_multiplier=multiplier, softcap=softcap)
        if step.role is Role.ACT and "tanh" in step.node.op:
            softcap, multiplier = multiplier, 1.0
        elif step.role not in LIGHT:
            return None
        if step.role is Role.SCALE:
            multiplier = _times(flow, step, multiplier)
        value = step.inputs[0]
    return None


def _times(flow: Flow, step: Step, multiplier: float | None) -> float | None:
    constant = constant_factor(flow, step)
    return None if constant is None or multiplier is None else multiplier * constant


def _shape(flow: Flow, parameter: str) -> tuple[int, ...]:
    for node in flow.trace.nodes:
        if node.op == "parameter" and node.name == parameter:
            return flow.trace.values[node.outputs[0]].shape
    return ()


def _light_outputs(flow: Flow, value: int) -> list[int]:
    """`value` and everything made from it by light steps."""
    found, todo = [value], [value]
    while todo:
        for step in flow.readers(todo.pop()):
            if step.role in _OPEN:
                fresh = [v for v in step.outputs if v not in found]
                found += fresh
                todo += fresh
    return found


def _other(names: tuple[str, ...], taken: str | None) -> tuple[str, ...]:
    return tuple(name for name in names if name != taken)


def _name(flow: Flow, step: Step) -> str:
    return flow.path(step)
