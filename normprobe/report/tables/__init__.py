"""Tables of the measures that were asked for; one file a measure makes its own."""

from __future__ import annotations

from collections.abc import Iterator

from normprobe.records import ReportData
from normprobe.report.tables import batchnorm, cost, depth, gain, init, jacobian, norms, precision, products, smoothness
from normprobe.report.tables.table import Maker, Table

__all__ = ["MAKERS", "Maker", "Table", "tables"]

MAKERS: tuple[Maker, ...] = (
    init.make,
    gain.make,
    jacobian.make,
    smoothness.make,
    batchnorm.make,
    depth.make,
    norms.make,
    products.make,
    cost.make,
    precision.make,
)


def tables(data: ReportData) -> Iterator[Table]:
    """The tables of all measures that ran, in the order of `MAKERS`."""
    for make in MAKERS:
        yield from make(data.measurements)
