"""What the checks of computed weights share."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import ClassVar

from normprobe.checks.base import Check, Needs, Outcome
from normprobe.records import Anatomy, ComputedWeight, Finding, Reparametrization, ReportData


@dataclass(frozen=True)
class Slices:
    """A computed weight, and the slices of the parameter that it is made from.

    Attributes:
        known: how it is computed.
        held: what its slices are.
        writes: whether it ends a branch, so that the stream goes on beside it.
    """

    known: Reparametrization
    held: ComputedWeight
    writes: bool

    @property
    def whole(self) -> bool:
        """Whether one size is taken over all of the weight."""
        return self.held.count == 1

    def of(self, count: int, what: str = "slices", single: str = "the whole weight") -> str:
        """`all 16 slices`, `3 of 16 slices`, or `single` where there is one."""
        if self.whole:
            return single
        return f"all {self.held.count} {what}" if count == self.held.count else f"{count} of {self.held.count} {what}"


@dataclass(frozen=True)
class EachWeightCheck(Check):
    """Base of a check that judges every computed weight by itself."""

    needs: ClassVar[Needs] = Needs.STRUCTURE | Needs.WEIGHTS

    def check(self, data: ReportData) -> Outcome:
        """Yield what `judge` finds in each computed weight; one skip where none was read."""
        known = {(one.path, one.parameter): one for one in data.anatomy.reparametrizations}
        held = data.measurements.computed_weights
        ends = {name for stream in data.anatomy.streams for branch in stream.branches for name in branch.writers}
        if data.anatomy == Anatomy():
            yield self.skip("nothing of the model could be read")
        elif known and not held:
            yield self.skip("the values behind the computed weights were not read")
        for one in held:
            how = known[one.path, one.parameter]
            writes = one.parameter in ends or how.gain in ends
            yield from self.judge(Slices(how, one, writes), data)

    def broken(self, weight: Slices, places: str, source: str) -> Finding | None:
        """The finding of a parameter that is not finite, in `places`; None where it is."""
        held = weight.held
        if not held.non_finite:
            return None
        text = f"{held.parameter} is NaN or infinite in {places}"
        return self.finding(held.path, text, value=float("nan"), bound=0.0, source=source)

    @abstractmethod
    def judge(self, weight: Slices, data: ReportData) -> Outcome:
        """Yield what is wrong with this weight."""
