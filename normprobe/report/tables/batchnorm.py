"""The table of the batch norms: the farthest from their stored statistics first."""

from __future__ import annotations

import math
from collections.abc import Iterator

from normprobe.records import Measurements
from normprobe.records.batchnorm import BatchNormMeasure, BatchNormSite
from normprobe.report.tables.table import Table
from normprobe.report.wording import number

_COLUMNS = (
    "batch norm",
    "values a channel",
    "stored",
    "momentum",
    "batches seen",
    "shift",
    "variance ratio",
    "worst channel, nat",
)


def make(measured: Measurements) -> Iterator[Table]:
    """One row a batch norm."""
    found = measured.batchnorm
    if found is None:
        return
    rows = sorted(found.sites, key=_distance, reverse=True)
    yield Table("Batch norms", _caption(found), _COLUMNS, tuple(map(_row, rows)))


def _caption(found: BatchNormMeasure) -> str:
    gaps = (("in train and eval mode", found.train_eval_gap), ("of half the batch and the whole", found.halves_gap))
    said = [f"outputs {text} differ by {number(100 * value)} %" for text, value in gaps if value is not None]
    said = said or ["statistics of the batch against the stored ones"]
    if any(site.finite is not None for site in found.sites):
        said.append("stored statistics " + ("left as they were" if found.untouched else "CHANGED BY LOOKING"))
    return "; ".join(said)


def _distance(site: BatchNormSite) -> float:
    if site.kept is None:
        return math.inf if site.finite is False else -1.0
    return math.inf if math.isnan(site.kept.divergence_max) else site.kept.divergence_max


def _row(site: BatchNormSite) -> tuple[str, ...]:
    kept = site.kept
    numbers = ["-"] * 3
    if kept is not None:
        worst = f"{number(kept.divergence_max)} at {kept.worst_channel}"
        numbers = [number(kept.mean_shift), number(kept.variance_ratio), worst]
    seen = "-" if site.tracked is None else str(site.tracked)
    return (site.path, str(site.count), _stored(site), _momentum(site), seen, *numbers)


def _stored(site: BatchNormSite) -> str:
    if site.finite is None:
        return "none"
    said = "not finite" if not site.finite else "default" if site.default else site.keeps
    return f"{said}, {site.below_eps} of {site.channels} below eps" if site.below_eps else said


def _momentum(site: BatchNormSite) -> str:
    if site.momentum is not None:
        return number(site.momentum)
    return "average" if site.keeps == "moving" and site.tracked is not None else "-"
