"""NP706."""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

from normprobe.checks.base import Outcome
from normprobe.checks.batchnorm.each_batch_norm import SURE, BatchNormCheck
from normprobe.records import Finding, Fix, ReportData, Severity
from normprobe.records.batchnorm import BatchNormMeasure, BatchNormSite


@final
@dataclass(frozen=True)
class ThawingBatchNorm(BatchNormCheck):
    """A batch norm looks frozen, and the next `train()` moves its statistics.

    ## What it measures

    Batch norms whose statistics train mode moves, and which are frozen in one of two ways that do not hold:
    their own train flag is off in a model whose flag is on, until the next `model.train()`; or their gain and
    offset require no gradient while other parameters of the model do, which does not stop the statistics.

    ## Why it matters

    Fine-tuning with small batches or other data then moves the statistics of a backbone that was to stay as it
    is. Losses look normal; the model is worse in eval mode.

    ## What to do

    Override `train()` so that it leaves these modules in eval mode, or replace them by a norm that applies fixed
    statistics as constants.

    ## When to ignore it

    When the statistics are to follow the new data, as in domain adaptation; or when the training loop sets the
    modules to eval mode after each `train()`.

    ## References

    PyTorch documentation, `torch.nn.Module.train` and `torch.nn.BatchNorm2d` (statistics move in train mode,
    whatever requires a gradient); Li et al. 2017 (AdaBN), sec. 3 (statistics moved on purpose).
    """

    code, name, severity, since = "NP706", "thawing-batch-norm", Severity.WARNING, "0.1.0"
    fixes = (Fix(rewrite="FreezeBatchNorm", at_places=True),)
    needs = SURE

    def judge(self, found: BatchNormMeasure, data: ReportData) -> Outcome:
        """Yield one finding for each way in which batch norms are frozen."""
        moving = [site for site in found.sites if site.keeps == "moving"]
        flagged = [site for site in moving if found.training and site.training is False]
        if flagged:
            message = "its train flag is off while the model's is on: the next train() moves its statistics again"
            yield self._found(flagged, message, "train flag")
        held = [site for site in moving if site.learns is False and found.others_learn and site not in flagged]
        if held:
            message = "its gain and offset are frozen, its statistics are not: train mode moves them"
            yield self._found(held, message, "frozen gain")

    def _found(self, sites: list[BatchNormSite], message: str, about: str) -> Finding:
        return self.finding(
            sites[0].path,
            message,
            value="moving",
            source="torch.nn.Module.train sets the flag of every module inside",
            places=[site.path for site in sites],
            about=about,
        )
