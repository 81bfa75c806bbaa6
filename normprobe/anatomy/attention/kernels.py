"""What operations of other libraries do to tokens: they are run on random numbers."""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import product
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from normprobe.anatomy.flow.ops import Role, foreign
from normprobe.anatomy.flow.steps import Flow, Step
from normprobe.capture.leaves import replaced, tensors
from normprobe.capture.trace import Ref
from normprobe.capture.writes import written

_LARGEST = 1 << 22  # elements of all arguments; operations on larger ones are not run
_FAR = 1e-2  # share of its size by which a result may differ from that of attention, in half precision too


@dataclass(frozen=True)
class Mixing:
    """How an operation brings rows (all axes but the last) together: as the softmax of products of its first three
    signals does, or otherwise; `alone` where each result depends on one row. `why` says what left it unknown."""

    how: Literal["attention", "other", "alone", "unknown"]
    why: str = ""


def mixing(flow: Flow, step: Step) -> Mixing | None:
    """What an operation of another library does to rows; None for all other steps."""
    if step.role is not Role.HEAVY or not foreign(step.node.op):
        return None
    arguments = repr(replaced((step.node.args, step.node.kwargs), lambda ref: flow.shape(ref.value), of=Ref))
    key = ("mixing", step.node.op, arguments, tuple(v in step.inputs for v in step.node.inputs))
    if key not in flow.memo:
        flow.memo[key] = _told(flow, step)
    found: Mixing = flow.memo[key]
    return found


def _told(flow: Flow, step: Step) -> Mixing:
    if getattr(step.node.function, "_schema", None) is None:
        return Mixing("unknown", "does not say what it reads and writes")
    given = _drawn(flow, step)
    if isinstance(given, str):
        return Mixing("unknown", given)
    why = ""
    for device in ("cpu", "cuda") if torch.cuda.is_available() else ("cpu",):
        try:
            with torch.no_grad(), torch.random.fork_rng([torch.cuda.current_device()] if device == "cuda" else []):
                return _compared(step, {v: t.to(device) for v, t in given.items()})
        except Exception as error:  # whatever another library raises: a missing kernel, a demand on an argument
            line = str(error).partition("\n")[0][:100]
            why = why or f"could not be run on random numbers ({type(error).__name__}: {line})"
    return Mixing("unknown", why)


def _drawn(flow: Flow, step: Step) -> dict[int, Tensor] | str:
    """Random numbers and known indices and masks in the place of all tensors that a step reads; else why not."""
    generator, found = torch.Generator().manual_seed(0), {}
    if sum(math.prod(flow.shape(v)) for v in step.node.inputs) > _LARGEST:
        return f"reads more than {_LARGEST} numbers, and is not run on as many"
    for value in step.node.inputs:
        drawn: Tensor | None = None
        if flow.floating(value):
            drawn = torch.randn(flow.shape(value), generator=generator).to(flow.trace.values[value].dtype)
        elif flow.levels.parameters(value):  # packed weights
            drawn = torch.randint(0, 2, flow.shape(value), generator=generator).to(flow.trace.values[value].dtype)
        elif not flow.levels.signal(value):
            drawn = flow.statics.tensor(value)
        if drawn is None:
            return "reads whole numbers that are not known"
        found[value] = drawn
    return found


def _compared(step: Step, given: dict[int, Tensor]) -> Mixing:
    """What becomes of other rows when the first one is changed, or the last."""
    before = _run(step, given)
    if _moved(before, _run(step, given)).any():
        return Mixing("unknown", "gives other results each time")
    if before.dim() < 2 or before.shape[:-1].numel() < 2 or not before.isfinite().any():
        return Mixing("unknown", "was run on a single row" if before.isfinite().any() else "gives no finite results")
    first, last = (_moved(before, _run(step, _changed(step, given, row))) for row in (0, -1))
    if not bool(first[1:].any() or last[:-1].any()):
        return Mixing("alone")
    attends = len(step.inputs) > 2 and _attends(before, [given[v] for v in step.inputs[:3]])
    return Mixing("attention" if attends else "other")


def _changed(step: Step, given: dict[int, Tensor], row: int) -> dict[int, Tensor]:
    changed = {v: t.clone() for v, t in given.items()}
    for value in step.inputs:
        if given[value].is_floating_point():
            rows = changed[value].view(-1, given[value].shape[-1])
            rows[row] += torch.linspace(1, 2, rows.shape[-1]).to(rows)
    return changed


def _moved(before: Tensor, after: Tensor) -> Tensor:
    """Which rows differ."""
    return ((before != after) & ~(before.isnan() & after.isnan())).any(-1).flatten()


def _run(step: Step, given: dict[int, Tensor]) -> Tensor:
    """What a step makes, or writes into a tensor that it is given; from one random state."""
    torch.default_generator.manual_seed(0)
    if any(tensor.is_cuda for tensor in given.values()):
        torch.cuda.manual_seed(0)
    fresh = {value: tensor.clone() for value, tensor in given.items()}
    args, kwargs = replaced((step.node.args, step.node.kwargs), lambda ref: fresh[ref.value], of=Ref)
    output, changed = step.node.function(*args, **kwargs), written(step.node.function, args, kwargs)
    made = [t for t in tensors(output) if not any(t is w for w in changed)]
    return [*made, *changed][step.node.outputs.index(step.outputs[0])].double()


def _attends(made: Tensor, operands: list[Tensor]) -> bool:
    """Whether a result is attention, with the tokens on the last axis but one or two, of all keys or the earlier."""
    for turned, causal in product((False, True), repeat=2):
        q, k, v = (t.double().transpose(1, 2) if turned else t.double() for t in operands)
        ranked = min(q.dim(), k.dim(), v.dim()) > 2 and k.shape == v.shape
        if not ranked or (causal and q.shape[-2] != k.shape[-2]) or q.shape[-3] % k.shape[-3]:
            continue
        known = F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=q.shape[-3] != k.shape[-3])
        known = known.transpose(1, 2) if turned else known
        if known.shape == made.shape and bool((known - made).norm() <= _FAR * known.norm()):
            return True
    return False
