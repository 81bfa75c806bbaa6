"""NP704."""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

from normprobe.checks.base import Outcome, Unit, limit
from normprobe.checks.batchnorm.each_batch_norm import SURE, BatchNormCheck
from normprobe.records import Fix, ReportData, Severity
from normprobe.records.batchnorm import BatchNormMeasure


@final
@dataclass(frozen=True)
class UnsynchronisedBatchNorm(BatchNormCheck):
    """Several processes train together, and each has batch statistics of its own.

    ## What it measures

    The number of processes of torch's process group, and whether the batch norms that move in train mode share
    their statistics between them. A warning where this process has fewer samples than the limit, else a note.
    Of norms that are not torch's own it is not known.

    ## Why it matters

    Data parallel training averages gradients, not statistics: the batch that normalises is that of one process,
    and the running statistics that are saved are those of the first.

    ## What to do

    `torch.nn.SyncBatchNorm.convert_sync_batchnorm(model)` before it is wrapped for data parallel training, or norms
    that know no batch.

    ## When to ignore it

    When the batch of each process is large; many recipes for images then choose it on purpose, as it is faster.

    ## References

    Peng et al. 2018 (MegDet), sec. 3 (cross-GPU batch norm); Wu & He 2018 (Group Normalization), fig. 1.
    """

    code, name, severity, since = "NP704", "unsynchronised-batch-norm", Severity.WARNING, "0.1.0"
    fixes = (Fix(rewrite="ToSyncBatchNorm", at_places=True),)
    needs = SURE

    min_samples: float = limit(
        16.0, unit=Unit.ONE, source="Wu & He 2018, fig. 1: errors of batch norm rise below 16 samples a process"
    )

    def judge(self, found: BatchNormMeasure, data: ReportData) -> Outcome:
        """Yield one finding for all batch norms that do not share their statistics."""
        if found.processes < 2:
            return
        moving = [site for site in found.sites if site.keeps == "moving"]
        unknown = [site.path for site in moving if site.synchronised is None]
        if unknown:
            yield self.skip(
                f"whether it shares statistics between the {found.processes} processes is not known", unknown
            )
        apart = [site.path for site in moving if site.synchronised is False]
        if apart:
            few = self.exceeds(found.basis.count, least=self.min_samples)
            yield self.finding(
                apart[0],
                f"each of {found.processes} processes has statistics of its own, this one of "
                f"{found.basis.count} samples",
                value=float(found.basis.count),
                against="min_samples",
                severity=Severity.WARNING if few else Severity.NOTE,
                places=apart,
            )
