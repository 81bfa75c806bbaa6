"""NP705."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import final

from normprobe.checks.base import Outcome, Unit, limit, number
from normprobe.checks.batchnorm.each_batch_norm import SURE, BatchNormCheck
from normprobe.checks.norms.gains import looks_drawn
from normprobe.records import Finding, ReportData, Severity
from normprobe.records.batchnorm import BatchNormMeasure, BatchNormSite


@final
@dataclass(frozen=True)
class StaleStatistics(BatchNormCheck):
    """Stored statistics of a batch norm are broken, were never moved, or do not fit this batch.

    ## What it measures

    The stored means and variances. An error: they are not finite, a variance is negative, or all variances are
    0. A warning: they are exactly the 0 and 1 of a fresh batch norm although batches were counted or the
    weights look trained, and in a model that is neither seen to be trained nor untrained where the batch does
    not fit them. A note: some variances are 0; the values at the start still weigh much in the running average;
    or the batch lies far from the stored statistics, by the Kullback-Leibler divergence of its median channel.

    A model whose weights look as they were drawn, and whose statistics have not moved, is fresh, and no finding.

    ## Why it matters

    Eval mode divides by what is stored. Statistics from elsewhere (lost in a conversion, reset, moved by too few
    batches, from before the weights changed) give the right model the wrong scale in every channel.

    ## What to do

    Load the buffers as well as the parameters. Else let the statistics see some hundred batches of training data
    in train mode, without a step of the optimiser.

    ## When to ignore it

    A note on the divergence, when the inputs that were probed are not like the training data, as noise is not.

    ## References

    Ioffe & Szegedy 2015, algorithm 2; Wu & Johnson 2021 (Rethinking "Batch" in BatchNorm), sec. 3; Izmailov et
    al. 2018 (Stochastic Weight Averaging), sec. 3.2 (statistics after the weights were changed).
    """

    code, name, severity, since = "NP705", "stale-statistics", Severity.ERROR, "0.1.0"
    needs = SURE
    explains = "NP504", "NP701"

    max_divergence: float = limit(
        0.5, unit=Unit.ONE, source="choice: in nat, a mean that is one stored standard deviation off"
    )
    max_start: float = limit(0.05, unit=Unit.RATIO, source="choice: a twentieth of the average, 29 batches at 0.1")

    def judge(self, found: BatchNormMeasure, data: ReportData) -> Outcome:
        """Yield one finding for each batch norm, for the worst that is wrong with it."""
        lost = [site.path for site in found.sites if site.keeps != "none" and _lost(site)]
        if lost:
            yield self.skip("the batch that it was given is not finite (NP504)", lost)
        for site in found.sites:
            if site.keeps != "none":
                yield from self._broken(site) or self._start(site, data) or self._far(site, data)

    def _found(
        self, site: BatchNormSite, severity: Severity, message: str, value: float | str, about: str
    ) -> list[Finding]:
        source = "Ioffe & Szegedy 2015, algorithm 2: eval mode divides by the stored variance"
        return [self.finding(site.path, message, value=value, source=source, severity=severity, about=about)]

    def _broken(self, site: BatchNormSite) -> list[Finding]:
        if site.finite is False:
            message = "a stored mean or variance is not finite, or a variance is negative"
            return self._found(site, Severity.ERROR, message, "not finite", "values")
        if site.zero_variances and site.zero_variances == site.channels:
            message = f"all {site.channels} stored variances are 0: eps alone sets the scale"
            return self._found(site, Severity.ERROR, message, 0.0, "variances")
        return []

    def _start(self, site: BatchNormSite, data: ReportData) -> list[Finding]:
        """Statistics that stand where they began."""
        if not site.default:
            return []
        init = data.measurements.init
        said = "the stored statistics are those of a fresh batch norm, mean 0 and variance 1"
        if site.tracked:
            return self._found(
                site, Severity.WARNING, f"{said}, although {site.tracked} batches were counted", "default", "start"
            )
        if init is not None and init.trained:
            return self._found(site, Severity.WARNING, f"{said}, although the weights look trained", "default", "start")
        if looks_drawn(data) or not self._differs(site):
            return []
        return self._found(
            site, Severity.WARNING, f"{said}, which this batch does not fit{_distance(site)}", "default", "start"
        )

    def _far(self, site: BatchNormSite, data: ReportData) -> Iterator[Finding]:
        if site.zero_variances:
            message = f"{site.zero_variances} of {site.channels} stored variances are 0: eps alone sets their scale"
            yield from self._found(site, Severity.NOTE, message, float(site.zero_variances), "variances")
        if site.tracked and site.initial_share is not None and self.exceeds(site.initial_share, self.max_start):
            share = number(100 * site.initial_share)
            message = f"after {site.tracked} batches the values at the start still make {share} % of the statistics"
            yield self._note(site, message, site.initial_share, "max_start", "share of the start")
        fresh = site.default and looks_drawn(data)
        if not fresh and site.kept is not None and self._differs(site):
            message = f"the batch does not fit the stored statistics{_distance(site)}"
            yield self._note(site, message, site.kept.divergence, "max_divergence", "this batch")

    def _differs(self, site: BatchNormSite) -> bool:
        """Whether the batch lies far from the stored statistics; what is not finite lies nowhere."""
        kept = site.kept
        return kept is not None and not _lost(site) and self.exceeds(kept.divergence, self.max_divergence)

    def _note(self, site: BatchNormSite, message: str, value: float, against: str, about: str) -> Finding:
        return self.finding(site.path, message, value=value, against=against, severity=Severity.NOTE, about=about)


def _lost(site: BatchNormSite) -> bool:
    """Whether sound statistics are beside a batch that has none."""
    return site.finite is not False and site.kept is not None and math.isnan(site.kept.divergence)


def _distance(site: BatchNormSite) -> str:
    assert site.kept is not None
    kept = site.kept
    return (
        f": in the median channel {number(kept.divergence)} nat apart, the mean by {number(kept.mean_shift)} stored "
        f"standard deviations, the variance by a factor of {number(kept.variance_ratio)}"
    )
