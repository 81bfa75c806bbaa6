"""The tables of half precision: one a pass, the largest errors first."""

from __future__ import annotations

import math
from collections.abc import Iterator

from normprobe.records import Measurements
from normprobe.records.precision import PlaceError, PrecisionPass
from normprobe.report.tables.table import Table
from normprobe.report.wording import number, plural

_COLUMNS = ("place", "what", "relative error", "largest |x|", "norm reduces in")
_HOW = {"cast": "cast to {}", "own": "as it is, in {}", "autocast": "under {} autocast"}


def make(measured: Measurements) -> Iterator[Table]:
    """One row a norm, write, stream and output."""
    for one in measured.precision.passes if measured.precision is not None else ():
        rows = sorted(one.places, key=_size, reverse=True)
        title = "Precision, " + _HOW[one.how].format(one.dtype)
        yield Table(title, _caption(one), _COLUMNS, tuple(map(_row, rows)))


def _size(place: PlaceError) -> float:
    return math.inf if math.isnan(place.error) else place.error


def _caption(one: PrecisionPass) -> str:
    outputs = [place.error for place in one.places if place.place == "output"]
    said = [f"the output is {number(outputs[0])} off float32"] if outputs else []
    if one.first_non_finite is not None:
        said.append(f"first not finite: {one.first_non_finite}")
    if one.reductions:
        said.append(plural(sum(each.calls for each in one.reductions), "reduction") + " in half precision")
    return "; ".join(said)


def _row(place: PlaceError) -> tuple[str, ...]:
    error = number(place.error) if place.finite else "not finite"
    return (place.path, place.place, error, number(place.largest), place.reduction or "")
