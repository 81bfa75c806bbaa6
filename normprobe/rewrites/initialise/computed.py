"""Products with what is no weight of the Anatomy: computed from other parameters, or kept in integers."""

from __future__ import annotations

from collections.abc import Iterator

from normprobe.anatomy.flow.ops import Role
from normprobe.rewrites.base import Refusal, Survey
from normprobe.rewrites.initialise.choice import meant


def computed_weights(survey: Survey, only: tuple[str, ...] | str | None) -> Iterator[Refusal]:
    """A refusal for every product of the signal with such a weight, by its module."""
    flow, weights = survey.flow, {site.parameter for site in survey.anatomy.weights}
    sizes = {n.name: flow.shape(n.outputs[0]) for n in survey.trace.nodes if n.op in ("parameter", "buffer")}
    branches = [branch for stream in survey.anatomy.streams for branch in stream.branches]
    writers = {name for branch in branches for name in branch.writers}
    for step in flow.steps:
        if step.role is not Role.MATMUL or not weights.isdisjoint(step.parameters):
            continue
        names = [name for name in step.parameters if len(sizes.get(name, ())) > 1]
        role = "reader" if writers.isdisjoint(step.parameters) else "writer"
        if names and any(meant(name, (role,), only) for name in names):
            why = f"its weight is computed from {', '.join(names)}: no draw of these is known"
            yield Refusal(flow.path(step) or ".", why)
