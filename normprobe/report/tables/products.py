"""What every product with a weight gains."""

from __future__ import annotations

import math
from collections.abc import Iterator

from normprobe.records import Measurements
from normprobe.records.products import ProductGain
from normprobe.report.tables.table import Table
from normprobe.report.wording import number


def make(measured: Measurements) -> Iterator[Table]:
    """One row a product, those farthest from 1 first."""
    found = measured.products
    if found is None:
        return
    ordered = sorted(found.products, key=_distance, reverse=True)
    rows = tuple((one.parameter, ", ".join(one.roles), number(one.gain)) for one in ordered)
    caption = (
        f"second moment of the product, without bias, over that of the input; geometric mean {number(found.overall)}"
    )
    yield Table("Gain of products", caption, ("weight", "role", "E[y²]/E[x²]"), rows)


def _distance(one: ProductGain) -> float:
    return abs(math.log(one.gain)) if one.gain > 0 else math.inf
