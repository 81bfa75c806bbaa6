"""The table of the norms at work: those nearest to tanh first."""

from __future__ import annotations

import math
from collections.abc import Iterator

from normprobe.records import Measurements
from normprobe.records.norm_curves import NormCurve
from normprobe.report.tables.table import Table
from normprobe.report.wording import KINDS, number

_COLUMNS = ("norm", "kind", "tanh fit", "linear fit", "alpha", "scale", "gain mean", "gain range")


def make(measured: Measurements) -> Iterator[Table]:
    """One row a norm."""
    if measured.norms is None:
        return
    rows = sorted(measured.norms.norms, key=_bent, reverse=True)
    caption = "how much of the output scale · tanh(alpha · input) explains, and a line; gain and offset taken off"
    yield Table("Norms at work", caption, _COLUMNS, tuple(map(_row, rows)))


def _bent(curve: NormCurve) -> float:
    return -1.0 if math.isnan(curve.tanh_fit) else curve.tanh_fit


def _row(curve: NormCurve) -> tuple[str, ...]:
    gain = curve.gain
    told = ("", "") if gain is None else (number(gain.mean), f"{number(gain.smallest)} to {number(gain.largest)}")
    fits = (f"{curve.tanh_fit:.4f}", f"{curve.linear_fit:.4f}", number(curve.alpha), number(curve.scale))
    return (curve.path, KINDS[curve.kind], *fits, *told)
