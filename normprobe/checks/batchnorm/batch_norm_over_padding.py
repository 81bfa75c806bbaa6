"""NP703."""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

from normprobe.checks.base import Outcome
from normprobe.checks.batchnorm.each_batch_norm import SURE, BatchNormCheck
from normprobe.records import ReportData, Severity
from normprobe.records.batchnorm import BatchNormMeasure


@final
@dataclass(frozen=True)
class BatchNormOverPadding(BatchNormCheck):
    """Padding tokens enter the statistics of a batch norm.

    ## What it measures

    For every batch norm whose statistics move in train mode and run over the tokens of padded sequences: how
    many places that the caller's mask calls padding stand behind each statistic. It is read off the shape of
    the norm's input, so that tokens which the model took out before are not counted.

    ## Why it matters

    The statistics then depend on how much padding a batch happens to hold, and so does what every real token
    becomes in train mode. Evaluation with another share of padding, or with none, runs on statistics that fit
    nothing.

    ## What to do

    Take the padding out before the norm and put the tokens back behind it, compute the statistics under the
    mask, or use a norm over features.

    ## When to ignore it

    When the stored statistics are never moved again.

    ## References

    Shen et al. 2020 (PowerNorm), sec. 3 (batch statistics of text vary far more than those of images).
    """

    code, name, severity, since = "NP703", "batch-norm-over-padding", Severity.WARNING, "0.1.0"
    needs = SURE
    explains = ("NP701",)

    def judge(self, found: BatchNormMeasure, data: ReportData) -> Outcome:
        """Yield one finding for each batch norm that sees padding."""
        for site in found.sites:
            if site.padding and site.keeps == "moving":
                places = max(1, site.count)
                yield self.finding(
                    site.path,
                    f"{site.padding} of the {places} places behind each of its statistics are padding",
                    value=site.padding / places,
                    bound=0.0,
                    source="the shape of its input, and the mask that was given",
                )
