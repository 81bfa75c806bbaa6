"""What is added to a finished layer: adapters, narrow inside, and ways that start at zero."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from normprobe.records import Branch, ReportData, WeightSite

_NARROW = 0.5  # of the stream's width; an MLP of its own is wider inside


@dataclass(frozen=True)
class Additions:
    """The weights by which additions are told: those that are 0 all over, and where each is used."""

    zeros: frozenset[str]
    sites: Mapping[str, WeightSite]

    @classmethod
    def of(cls, data: ReportData) -> Additions:
        """Those of a report; no weight is known to be 0 where none was measured."""
        init = data.measurements.init
        zeros = () if init is None else (w.parameter for w in init.weights if w.distribution == "zero")
        return cls(frozenset(zeros), {site.parameter: site for site in data.anatomy.weights})

    def from_zero(self, branch: Branch) -> bool:
        """Whether a weight that writes is 0: a way that adds nothing before it is trained."""
        return not self.zeros.isdisjoint(branch.writers)

    def narrow(self, branch: Branch, width: int | None) -> bool:
        """Whether a branch is an MLP that is far narrower inside than the stream, as adapters are."""
        inside = [self.sites[name].fan_in for name in branch.writers if name in self.sites]
        return branch.kind == "mlp" and width is not None and 0 < sum(inside) <= _NARROW * width

    def form(self, branch: Branch) -> tuple[object, ...]:
        """What branches with the same operations on weights of the same shapes have in common."""
        shapes = tuple(self.sites[name].shape for name in branch.parameters if name in self.sites)
        return branch.kind, branch.recipe, shapes
