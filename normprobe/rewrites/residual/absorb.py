"""Which of the parameters that write to a stream can take a constant factor up."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from normprobe.anatomy.flow.ops import Role, base
from normprobe.anatomy.flow.steps import Flow, Step
from normprobe.records import Anatomy, Branch
from normprobe.rewrites.boundary import Boundaries

_LINEAR_ABOVE_0 = frozenset(f"aten.{n}" for n in ("relu", "relu_", "leaky_relu", "leaky_relu_"))
_PRODUCTS = frozenset({"aten.mul", "aten.mul_"})


def absorbing(anatomy: Anatomy) -> Mapping[str, str | None]:
    """For every writer, biases included, why it cannot be multiplied in place of the write; None where it can."""
    sites = {site.parameter: site for site in anatomy.weights}
    branches = [branch for stream in anatomy.streams for branch in stream.branches]
    uses = Counter(name for branch in branches for name in branch.writers)
    found: dict[str, str | None] = {}
    for name, count in uses.items():
        site = sites.get(name)
        if count > 1:
            found[name] = f"it writes {count} branches"
        elif site is not None and not {"reader", "writer"}.issuperset(site.roles):
            found[name] = f"it is used elsewhere too ({', '.join(site.roles)})"
        else:
            found[name] = None
    return found


@dataclass(frozen=True)
class Taken:
    """What becomes of a factor on the weights that write a branch.

    Attributes:
        behind: weights that read what another of them gives, as the second of two products in a row does where the
            first has a way around it: a factor on both would act twice on what passes both. True for one that only
            reads what is proportional to a factor on the others, and so has to be left as it is; False for one that
            reads something else too.
        why_not: why what is written is not multiplied by the factor; None where it is.
    """

    behind: Mapping[str, bool]
    why_not: str | None = None


def taken_up(boundaries: Boundaries, branch: Branch, writer: str) -> Taken:
    """Follow a factor c > 0 on the weights and biases that write `branch` to what the module `writer` returns."""
    flow, add, writers = boundaries.flow, boundaries.node(branch.add), frozenset(branch.writers)
    weights = writers.intersection(site.parameter for site in boundaries.survey.anatomy.weights)
    uses = [step for name in weights for step in boundaries.uses.get(name, ())]
    if add is None or not uses:
        return Taken({})
    first: set[str] = set()
    found: dict[str, bool] = {}
    broke: dict[int, Step | None] = {}  # of values behind a writer the step that is not proportional to the factor
    for step in flow.steps[min(uses) : flow.producer.get(add.outputs[0], 0)]:
        behind = [value for value in step.inputs if value in broke]
        own = weights.intersection(step.parameters) if step.role is Role.MATMUL else set()
        if not behind and not own:
            continue
        why = next((broke[value] for value in behind if broke[value] is not None), None)
        if why is None and behind and not _proportional(flow, step, behind, writers):
            why = step
        if behind:
            found |= {name: why is None and found.get(name, True) for name in own}
        else:
            first |= own
        broke |= dict.fromkeys(step.outputs, why)
    given = (call.outputs[0] for call in boundaries.trace.calls if call.path == writer and call.outputs)
    bent = next((bend for value in given if (bend := broke.get(value)) is not None), None)
    return Taken({name: whole and name not in first for name, whole in found.items()}, _told(branch, weights, bent))


def _told(branch: Branch, weights: frozenset[str], bent: Step | None) -> str | None:
    if bent is None:
        return None
    name = next(name for name in branch.writers if name in weights)
    return f"{name}: its product passes {bent.node.op.removeprefix('aten.')} before it is added"


def _proportional(flow: Flow, step: Step, behind: list[int], writers: frozenset[str]) -> bool:
    """Whether a step gives c times as much where the inputs `behind` and the `writers` among its parameters are c > 0
    times what they were."""
    other = [value for value in step.inputs if value not in behind and flow.floating(value)]
    if step.role is Role.ACT:
        return base(step.node.op) in _LINEAR_ABOVE_0
    if step.role is Role.GATE:
        return len(behind) == 1 and base(step.node.op) in _PRODUCTS
    if step.role is Role.SHIFT:
        return bool(step.parameters) and writers.issuperset(step.parameters)
    if step.role is Role.MATMUL:
        return len(behind) == 1
    return step.role in (Role.MOVE, Role.SCALE, Role.POOL, Role.ADD) and not other
