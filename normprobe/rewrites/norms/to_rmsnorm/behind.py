"""Whether what centred weights give still has no mean where it is added to the stream."""

from __future__ import annotations

from torch import Tensor

from normprobe.anatomy.flow.ops import PRODUCTS, Role, base
from normprobe.anatomy.flow.steps import Flow, Step
from normprobe.records import Stream
from normprobe.rewrites.boundary import Boundaries

_FILLING = frozenset({"aten.masked_fill", "aten.masked_fill_", "aten.where"})
_CHANGING = frozenset(  # moves that leave elements out, or put others in
    f"aten.{n}"
    for n in ("constant_pad_nd", "fill", "masked_scatter", "masked_scatter_", "native_dropout", "reflection_pad1d")
) | {"aten.tril", "aten.triu", "aten.masked_select"}
_SECOND = {"aten.mm": 1, "aten.bmm": 1, "aten.matmul": 1, "aten.baddbmm": 2}  # place of the factor whose columns stay
_ENDS = frozenset({Role.NORM, Role.ATTENTION})


def uncentred(boundaries: Boundaries, stream: Stream) -> str | None:
    """What brings a mean over the features back between a weight that writes and the sum; None where nothing does.

    Moves keep a mean of 0, and so do sums of what has none, factors that are one for all features, sums over tokens or
    experts, and vectors that write themselves, which are centred too. A clamp, an activation, a mask over features, a
    factor for each of them and a number that is added do not, whether or not the given inputs show it.
    """
    flow, writers = boundaries.flow, {name for branch in stream.branches for name in branch.writers}
    sums = {node.id for branch in stream.branches if (node := boundaries.node(branch.add)) is not None}
    broke: dict[int, Step | None] = {}  # of values behind a writer the step that brought a mean
    for step in flow.steps:
        behind = [value for value in step.inputs if value in broke]
        written = step.role is Role.MATMUL and not writers.isdisjoint(step.parameters)
        if written or not behind:
            broke |= dict.fromkeys(step.outputs if written and step.node.id not in sums else (), None)
            continue
        why = next((broke[value] for value in behind if broke[value] is not None), None)
        if step.node.id in sums:
            if why is not None:
                op, path = why.node.op.removeprefix("aten."), flow.path(why) or "."
                return f"{op} in {path} stands between a weight that writes and the sum: it can bring a mean back"
        elif step.role not in _ENDS and not (step.role is Role.MATMUL and step.parameters):
            kept = why is None and _keeps(flow, step, set(behind), writers, stream.width)
            broke |= dict.fromkeys(step.outputs, None if kept else why or step)
    return None


def _keeps(flow: Flow, step: Step, behind: set[int], writers: set[str], width: int | None) -> bool:
    """Whether a step gives what has no mean over the features, where its inputs `behind` have none."""
    others = [value for value in step.inputs if value not in behind and flow.floating(value)]
    if step.role is Role.SHIFT:
        return not others and bool(step.parameters) and writers.issuperset(step.parameters)
    if step.role is Role.ADD:
        return not others
    if step.role is Role.MATMUL:
        place = _SECOND.get(base(step.node.op))
        return place is not None and step.node.inputs[place] in behind and len(behind) == 1
    whole = all(flow.shape(value)[-1:] == (width,) for value in behind)
    if step.role is Role.POOL:
        return whole and flow.shape(step.outputs[0])[-1:] == (width,)
    if step.role in (Role.SCALE, Role.GATE):
        factors = [flow.shape(value) for value in (*others, *step.statics)]
        alike = all(not any(n > 1 for n in shape) or (whole and shape[-1] == 1) for shape in factors)
        return base(step.node.op) in PRODUCTS | {"aten.neg"} and len(behind) == 1 and alike
    return step.role is Role.MOVE and not others and _moves(flow, step, whole)


def _moves(flow: Flow, step: Step, whole: bool) -> bool:
    """Whether a move puts nothing but zeros, for all features alike, in the place of what it leaves out."""
    name = base(step.node.op)
    if name in _FILLING:
        masks = [value for value in step.node.inputs if not flow.floating(value)]
        alike = whole and all(flow.shape(mask)[-1:] in ((), (1,)) for mask in masks)
        return alike and all(_zero(flow, value) for value in step.statics if flow.floating(value)) and _no_fill(step)
    return name not in _CHANGING and not step.parameters and all(_zero(flow, value) for value in step.statics)


def _zero(flow: Flow, value: int) -> bool:
    held: Tensor | None = flow.statics.tensor(value) if flow.floating(value) else None
    return held is None or not bool(held.any())


def _no_fill(step: Step) -> bool:
    """Whether no other number than 0 is filled in by value."""
    return not any(isinstance(arg, float | int) and not isinstance(arg, bool) and arg != 0 for arg in step.node.args)
