"""Which of the parameters that write to a stream can take a constant factor up."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from normprobe.anatomy.flow.ops import Role, base
from normprobe.anatomy.flow.steps import Flow, Step
from normprobe.records import Anatomy, Branch
from normprobe.rewrites.boundary import Boundaries

_LINEAR_ABOVE_0 = frozenset(f"aten.{n}" for n in ("relu", "relu_", "leaky_relu", "leaky_relu_"))
_PRODUCTS = frozenset({"aten.mul", "aten.mul_"})
_HOMOGENEOUS = ("none", "gate", "relu", "leaky_relu")  # f(c·z) = c·f(z) for c > 0


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
        elif site is not None and site.followed_by not in _HOMOGENEOUS:
            found[name] = f"its product passes {site.followed_by} before it is added"
        else:
            found[name] = None
    return found


def behind_others(boundaries: Boundaries, branch: Branch) -> Mapping[str, bool]:
    """Which of the weights that write one branch read what another of them gives, as the second of two products in a
    row does where the first has a way around it: a factor on both would act twice on what passes both.

    Returns:
        True for a weight that only reads what is proportional to a factor on the others, and so has to be left as it
        is; False for one that reads something else too.
    """
    flow, add, writers = boundaries.flow, boundaries.node(branch.add), frozenset(branch.writers)
    weights = writers.intersection(site.parameter for site in boundaries.survey.anatomy.weights)
    uses = [step for name in weights for step in boundaries.uses.get(name, ())]
    if add is None or len(uses) < 2:
        return {}
    first: set[str] = set()
    found: dict[str, bool] = {}
    known: dict[int, bool] = {}  # values behind a writer: whether they are proportional to the factor
    for step in flow.steps[min(uses) : flow.producer.get(add.outputs[0], 0)]:
        behind = [value for value in step.inputs if value in known]
        own = weights.intersection(step.parameters) if step.role is Role.MATMUL else set()
        if not behind and not own:
            continue
        whole = all(known[value] for value in behind) and (not behind or _proportional(flow, step, behind, writers))
        if behind:
            found |= {name: whole and found.get(name, True) for name in own}
        else:
            first |= own
        known |= dict.fromkeys(step.outputs, whole)
    return {name: whole and name not in first for name, whole in found.items()}


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
