"""A series of numbers as one line of block characters."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

RAMP = "▁▂▃▄▅▆▇█"
BROKEN = "×"
_LEAST = math.log(2.0)


def spark(values: Sequence[float], width: int, *, log: bool, scale: Sequence[float] = ()) -> str:
    """`values` from left to right in `width` characters, the lowest as `▁` and the highest as `█`.

    Fewer values than characters are held, more are gathered by their largest, and a value that is not finite
    shows as `×` wherever it falls. On a log scale zero and below count as the lowest positive value, and the
    heights span a factor of two at least, so that a constant series with rounding noise looks constant.

    Args:
        values: the series, at least one value.
        width: characters, at least 1.
        log: logarithmic heights, else linear from the smaller of 0 and the lowest value.
        scale: further values that the heights must span as well, for two lines that share a scale.
    """
    low, high = _span([*values, *scale], log=log)
    return "".join(_sign(value, low, high, log=log) for value in _binned(values, width))


def _binned(values: Sequence[float], width: int) -> list[float]:
    edges = [cell * len(values) // width for cell in range(width + 1)]
    cells = [values[start : max(stop, start + 1)] for start, stop in pairwise(edges)]
    return [next((v for v in cell if not math.isfinite(v)), max(cell)) for cell in cells]


def _span(values: Sequence[float], *, log: bool) -> tuple[float, float]:
    finite = [value for value in values if math.isfinite(value) and not (log and value <= 0)]
    if not finite:
        return 0.0, 0.0
    low, high = min(finite), max(finite)
    return (math.log(low), max(math.log(high), math.log(low) + _LEAST)) if log else (min(0.0, low), high)


def _sign(value: float, low: float, high: float, *, log: bool) -> str:
    if not math.isfinite(value):
        return BROKEN
    if log and value <= 0:
        return RAMP[0]
    height = math.log(value) if log else value
    if high <= low:
        return RAMP[len(RAMP) // 2]
    return RAMP[min(len(RAMP) - 1, max(0, int((height - low) / (high - low) * len(RAMP))))]
