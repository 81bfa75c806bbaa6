"""The table of the batch norms: the farthest from their stored statistics first."""

from __future__ import annotations

import math
from collections.abc import Iterator

from normprobe.records import Measurements
from normprobe.records.batchnorm import BatchNormSite
from normprobe.report.tables.table import Table
from normprobe.report.wording import number

_COLUMNS = ("batch norm", "values a channel", "stored", "batches seen", "shift", "variance ratio", "worst channel, nat")


def make(measured: Measurements) -> Iterator[Table]:
    """One row a batch norm."""
    found = measured.batchnorm
    if found is None:
        return
    rows = sorted(found.sites, key=_distance, reverse=True)
    yield Table("Batch norms", _caption(found.train_eval_gap, found.halves_gap), _COLUMNS, tuple(map(_row, rows)))


def _caption(train_eval: float | None, halves: float | None) -> str:
    said = [
        f"outputs {text} differ by {value:.2%}"
        for text, value in (("in train and eval mode", train_eval), ("of half the batch and the whole", halves))
        if value is not None
    ]
    return "; ".join(said) or "statistics of the batch against the stored ones"


def _distance(site: BatchNormSite) -> float:
    if site.kept is None or math.isnan(site.kept.divergence_max):
        return math.inf if site.finite is False else -1.0
    return site.kept.divergence_max


def _row(site: BatchNormSite) -> tuple[str, ...]:
    stored = "none" if site.finite is None else "not finite" if not site.finite else "default" if site.default else ""
    kept = site.kept
    numbers = () if kept is None else (kept.mean_shift, kept.variance_ratio)
    worst = "" if kept is None else f"{number(kept.divergence_max)} at {kept.worst_channel}"
    told = [number(value) for value in numbers] or ["", ""]
    return (site.path, str(site.count), stored or site.keeps, _count(site.tracked), *told, worst)


def _count(tracked: int | None) -> str:
    return "" if tracked is None else str(tracked)
