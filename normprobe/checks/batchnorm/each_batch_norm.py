"""What the checks of batch norms share."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass

from normprobe.checks.base import Check, Needs, Outcome
from normprobe.records import ReportData
from normprobe.records.batchnorm import BatchNormMeasure

SURE = Needs.STRUCTURE | Needs.FORWARD


@dataclass(frozen=True)
class BatchNormCheck(Check):
    """Base of a check of the batch norms; silent where every norm is known to be of another kind."""

    def check(self, data: ReportData) -> Outcome:
        """Yield what `judge` finds, or why it cannot."""
        norms, found = data.anatomy.norms, data.measurements.batchnorm
        if not norms:
            yield self.skip("no norm was found")
        unknown = [norm.path for norm in norms if norm.kind == "unknown" and norm.executed]
        if unknown:
            yield self.skip("what kind of norm it is could not be told", unknown)
        if found is not None:
            yield from self.judge(found, data)
            return
        missed = [norm.path for norm in norms if norm.kind == "batchnorm" and norm.executed]
        if missed:
            yield self.skip("what it stores and what it is given was not measured", missed)

    @abstractmethod
    def judge(self, found: BatchNormMeasure, data: ReportData) -> Outcome:
        """Yield what is wrong with the batch norms that were measured."""
