"""Which weights read what a norm gives, and whether nothing else does."""

from __future__ import annotations

from collections import defaultdict

from normprobe.anatomy.flow.ops import Role
from normprobe.anatomy.flow.steps import Step
from normprobe.records import NormSite, WeightSite
from normprobe.rewrites.base import Survey


class Readers:
    """The readers of every norm that is a module, from one recorded forward."""

    def __init__(self, survey: Survey) -> None:
        self.trace = survey.trace
        self.flow = survey.flow
        self.weights = {site.parameter: site for site in survey.anatomy.weights}
        self.uses: dict[str, set[int]] = defaultdict(set)
        for step in self.flow.steps:
            for name in step.parameters:
                self.uses[name].add(step.id)

    def of(self, norm: NormSite) -> tuple[WeightSite, ...] | str:
        """The weights that read the norm's output along its features, or what else reads it."""
        calls = [call for call in self.trace.calls if call.path == norm.path and not call.composite]
        given = [call.outputs[0] for call in calls if call.outputs]
        if not given or len(given) != len(calls):
            return "what it returns could not be followed"
        if any(value in self.flow.outputs for value in given):
            return "the model returns what it gives"
        steps = self._steps(given, norm.size)
        if isinstance(steps, str):
            return steps
        found = {name: self.weights[name] for step in steps for name in step.parameters if name in self.weights}
        for name, site in found.items():
            if self.uses[name] - {step.id for step in steps}:
                return f"{name} reads something else too"
            if site.kind not in ("linear", "experts") or site.fan_in != norm.size:
                return f"{name} is a {site.kind} over {site.fan_in} inputs"
        places = [site.site for site in found.values()]
        unreached = (site for name, site in self.weights.items() if name not in self.uses and site.site in places)
        return (*found.values(), *unreached) or "nothing with weights reads it"

    def _steps(self, given: list[int], size: int | None) -> list[Step] | str:
        """The products that read these values, past moves that keep the last axis."""
        found: dict[int, Step] = {}
        todo, seen = list(given), set(given)
        while todo:
            for step in self.flow.readers(todo.pop()):
                if step.role is Role.MATMUL and any(name in self.weights for name in step.parameters):
                    found[step.id] = step
                elif step.role is Role.MOVE and all(self.flow.shape(v)[-1:] == (size,) for v in step.outputs):
                    fresh = [v for v in step.outputs if v not in seen]
                    if any(v in self.flow.outputs for v in fresh):
                        return "the model returns what it gives"
                    seen.update(fresh)
                    todo += fresh
                else:
                    return f"{step.node.op.removeprefix('aten.')} in {self.flow.path(step) or '.'} reads it too"
        return list(found.values())
