"""NP702."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import final

from normprobe.checks.base import Outcome, Unit, limit
from normprobe.checks.batchnorm.each_batch_norm import SURE, BatchNormCheck
from normprobe.records import Fix, ReportData, Severity
from normprobe.records.batchnorm import BatchNormMeasure, BatchNormSite


@final
@dataclass(frozen=True)
class SmallBatch(BatchNormCheck):
    """Too few values stand behind the statistics of a batch norm in train mode.

    ## What it measures

    How many values of the given batch, over samples and places, stand behind the statistic of a channel, for
    batch norms whose stored statistics move in train mode. One value is a warning, as it has no variance and
    torch refuses it; fewer than the limit is a note. It is judged where the model was given in train mode; a
    model in eval mode does not use the statistics of its batch.

    ## Why it matters

    With n values the variance has a relative standard error of √(2/(n − 1)): 37 % for 16. The noise reaches
    every output and the stored statistics, and the error of trained models rises. A map that was pooled to
    1 × 1 has one value a sample, so that the last, smaller batch of an epoch may stop the training.

    ## What to do

    Drop the last incomplete batch, use a larger one or share statistics between processes; no batch norm behind
    a global pooling; group or layer norm where batches have to be small.

    ## When to ignore it

    When the batch that was probed is smaller than those of training.

    ## References

    Wu & He 2018 (Group Normalization), fig. 1 and sec. 1 (errors by batch size); Ioffe 2017 (Batch
    Renormalization), sec. 1.
    """

    code, name, severity, since = "NP702", "small-batch", Severity.WARNING, "0.1.0"
    fixes = (Fix(rewrite="ToGroupNorm", at_places=True),)
    needs = SURE
    explains = ("NP701",)

    min_values: float = limit(
        16.0, unit=Unit.ONE, source="choice: a relative standard error of the variance, √(2/(n − 1)), of 37 %"
    )

    def judge(self, found: BatchNormMeasure, data: ReportData) -> Outcome:
        """Yield one warning for norms with a single value a channel, and one note for those with few."""
        if found.training is False:
            return
        moving = [site for site in found.sites if site.keeps == "moving" and site.training is not False]
        single = [site for site in moving if site.count < 2]
        few = [site for site in moving if site not in single and self.exceeds(site.count, least=self.min_values)]
        if single:
            told = "one value a channel, which has no variance: train mode cannot run on this batch"
            yield from self._told(single, told + _pooled(single, found), Severity.WARNING)
        for count in sorted({site.count for site in few}):
            chosen = [site for site in few if site.count == count]
            told = f"{count} values a channel in this batch"
            yield from self._told(chosen, told + _pooled(chosen, found), Severity.NOTE)

    def _told(self, sites: list[BatchNormSite], message: str, severity: Severity) -> Outcome:
        yield self.finding(
            sites[0].path,
            message,
            value=float(sites[0].count),
            against="min_values",
            severity=severity,
            places=[site.path for site in sites],
        )


def _pooled(sites: Iterable[BatchNormSite], found: BatchNormMeasure) -> str:
    """Says that maps have shrunk to one place, where all have."""
    samples = int(found.basis.count)
    pooled = all(len(site.shape) > 2 and site.count == samples for site in sites)
    return "; its map is one place large, so that samples alone make up the statistic" if pooled else ""
