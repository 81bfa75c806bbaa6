"""The tables of half precision: one a pass, the largest errors first, and one of its half-precision reductions."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator

from normprobe.records import Measurements
from normprobe.records.precision import PlaceError, PrecisionPass
from normprobe.report.tables.table import Table
from normprobe.report.wording import BRANCHES, number, plural

_COLUMNS = ("place", "what", "relative error", "largest |x|", "reduces in")
_REDUCTIONS = ("module", "operation", "calls")
_HOW = {"cast": "cast to {}", "own": "as it is, in {}", "autocast": "under {} autocast"}


def make(measured: Measurements) -> Iterator[Table]:
    """One row a norm, write, stream and output; one an operation that reduces in half precision."""
    for one in measured.precision.passes if measured.precision is not None else ():
        how = _HOW[one.how].format(one.dtype)
        rows = sorted(zip(one.places, _labels(one), strict=True), key=lambda row: _size(row[0]), reverse=True)
        yield Table(f"Precision, {how}", _caption(one), _COLUMNS, tuple(_row(*row) for row in rows))
        if one.reductions:
            calls = plural(sum(each.calls for each in one.reductions), "call")
            found = tuple((each.path, each.op, str(each.calls)) for each in one.reductions)
            yield Table(f"Reductions in half precision, {how}", f"{calls}, in order of time", _REDUCTIONS, found)


def _size(place: PlaceError) -> float:
    return math.inf if math.isnan(place.error) else place.error


def _labels(one: PrecisionPass) -> Iterator[str]:
    """Each place with the kinds of the branches that write there, and the number of its run from the second on."""
    runs: Counter[tuple[str, str]] = Counter()
    for place in one.places:
        kinds = " + ".join(BRANCHES.get(kind, kind) for kind in place.kinds)
        label = f"{place.path} ({kinds})" if kinds else place.path
        runs[place.place, label] += 1
        run = runs[place.place, label]
        yield label if run == 1 else f"{label}, run {run}"


def _caption(one: PrecisionPass) -> str:
    said = []
    output = next((place for place in one.places if place.place == "output"), None)
    if output is not None:
        relative = f"relative error of the output {number(output.error)} against float32"
        said.append(relative if output.finite else "the output is not finite")
    if one.first_non_finite is not None:
        operation = f" ({one.first_operation})" if one.first_operation is not None else ""
        said.append(f"first not finite: {one.first_non_finite}{operation}")
    return "; ".join(said)


def _row(place: PlaceError, label: str) -> tuple[str, ...]:
    error = number(place.error) if place.finite else "not finite"
    return (label, place.place, error, number(place.largest), place.reduction or "")
