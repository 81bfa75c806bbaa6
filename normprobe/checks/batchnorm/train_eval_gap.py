"""NP701."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import final

from normprobe.checks.base import Outcome, Unit, limit, number
from normprobe.checks.batchnorm.each_batch_norm import SURE, BatchNormCheck
from normprobe.checks.norms.gains import looks_drawn
from normprobe.records import ReportData, Severity
from normprobe.records.batchnorm import BatchNormMeasure


@final
@dataclass(frozen=True)
class TrainEvalGap(BatchNormCheck):
    """Outputs differ between train and eval mode, because of batch norms alone.

    ## What it measures

    ‖train − eval‖ / ‖eval‖ over all floating outputs, with the batch norms in train mode and all else in eval
    mode, on this batch; it takes the measure `batchnorm`. What chance explains is allowed: with n values behind
    a statistic, even stored statistics that are right differ from those of the batch by √(1/n) in the mean and
    √(1/2n) in the scale, so that the limit is at least the root of the sum of 1.5/n over all batch norms.

    ## Why it matters

    A model that is trained with the statistics of batches and served with stored ones is two models where these
    disagree. The usual signs are a good loss and a bad evaluation.

    ## What to do

    Look at the batch norms with the largest divergence (NP705): let the statistics see more batches, with the
    data and the batch size of training; or replace batch norms by norms that know no batch.

    ## When to ignore it

    When this batch is not like the training data (noise, one class). A model whose weights were just drawn has
    statistics that mean nothing yet: that is a note.

    ## References

    Ioffe & Szegedy 2015, sec. 3.1; Ioffe 2017 (Batch Renormalization), sec. 3; Wu & Johnson 2021 (Rethinking
    "Batch" in BatchNorm), sec. 3.
    """

    code, name, severity, since = "NP701", "train-eval-gap", Severity.WARNING, "0.1.0"
    needs = SURE

    max_gap: float = limit(
        0.3, unit=Unit.RATIO, source="choice: a third of the output's norm; classes are decided by less seldom"
    )

    def judge(self, found: BatchNormMeasure, data: ReportData) -> Outcome:
        """Yield one finding where the gap is larger than the limit and than chance."""
        moving = [site for site in found.sites if site.keeps == "moving"]
        if not moving:
            return
        gap = found.train_eval_gap
        if gap is None:
            yield self.skip('train mode was not run against eval mode: ask for the measure "batchnorm"')
            return
        chance = math.sqrt(1.5 * math.fsum(1 / site.count for site in moving))
        if self.exceeds(gap, max(self.max_gap, chance)):
            worst = max(moving, key=lambda site: -1.0 if site.kept is None else site.kept.divergence)
            most = "" if worst.kept is None else f"; {worst.path} lies {number(worst.kept.divergence)} nat apart"
            yield self.finding(
                ".",
                f"outputs in train and in eval mode differ by {number(100 * gap)} % of their norm{most}",
                value=gap,
                against="max_gap",
                severity=Severity.NOTE if looks_drawn(data) else Severity.WARNING,
            )
