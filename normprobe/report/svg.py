"""Series by depth as a small SVG chart that follows the page's colours."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from html import escape

from normprobe.report.series import Series
from normprobe.report.wording import number

WIDTH, HEIGHT = 540, 190
_LEFT, _RIGHT, _TOP, _BOTTOM = 58, 12, 10, 28


def chart(one: Series) -> str:
    """One series with its reference (dashed) and companion (thin) as an `<svg>` element.

    Points have tooltips with place and value; where a value is not finite the line breaks and a cross shows.
    """
    axes = _Axes(one)
    parts = [
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(_described(one))}">',
        *axes.grid(),
        *axes.line(one.companion, "np-companion"),
        *axes.line(one.reference, "np-reference"),
        *axes.line(one.values, "np-series"),
        *axes.points(one),
        "</svg>",
    ]
    return "".join(parts)


def _described(one: Series) -> str:
    return f"{one.label}: {number(one.values[0])} at first, {number(one.values[-1])} at last"


def _round_multiples(low: float, high: float) -> list[float]:
    rough = (high - low) / 4
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= rough)
    return [step * count for count in range(math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9) + 1)]


class _Axes:
    """Maps depth and value to the pixels of the chart."""

    def __init__(self, one: Series) -> None:
        every = [*one.values, *one.reference, *one.companion]
        shown = [v for v in every if math.isfinite(v) and not (one.log and v <= 0)]
        self.log, self.count, self.step = one.log, len(one.values), one.step
        self.low, self.high = self._span(shown)

    def _span(self, shown: Sequence[float]) -> tuple[float, float]:
        if not shown:
            return (0.0, 1.0)
        if not self.log:
            return min(0.0, *shown), max(*shown, min(0.0, *shown) + 1e-9)
        low, high = math.log10(min(shown)), math.log10(max(shown))
        pad = max(0.04 * (high - low), 0.25 - (high - low) / 2)
        return low - pad, high + pad

    def x(self, index: int) -> float:
        """Pixel column of the value at `index`."""
        inner = WIDTH - _LEFT - _RIGHT
        return _LEFT + (inner / 2 if self.count == 1 else inner * index / (self.count - 1))

    def y(self, value: float) -> float:
        """Pixel row of `value`; on a log scale zero and below lie on the bottom."""
        bottom, inner = HEIGHT - _BOTTOM, HEIGHT - _TOP - _BOTTOM
        if self.log and value <= 0:
            return bottom
        height = math.log10(value) if self.log else value
        return bottom - inner * (height - self.low) / (self.high - self.low)

    def grid(self) -> Iterator[str]:
        """Horizontal lines with their values, and the first and the last depth."""
        for value in self._ticks():
            y = f"{self.y(value):.1f}"
            beside = f'x="{_LEFT - 6}" y="{y}" dy=".32em" text-anchor="end"'
            yield f'<line class="np-grid" x1="{_LEFT}" x2="{WIDTH - _RIGHT}" y1="{y}" y2="{y}"/>'
            yield f'<text class="np-tick" {beside}>{number(value)}</text>'
        row = HEIGHT - _BOTTOM + 20
        yield f'<text class="np-tick" x="{_LEFT}" y="{row}">{self.step} 1</text>'
        if self.count > 1:
            last = f"{self.step} {self.count}"
            yield f'<text class="np-tick" x="{WIDTH - _RIGHT}" y="{row}" text-anchor="end">{last}</text>'

    def _ticks(self) -> list[float]:
        """Round values inside the axis: multiples of 1, 2 or 5 times a power of ten, at least two."""
        if not self.log:
            return _round_multiples(self.low, self.high)
        decades = range(math.ceil(self.low), math.floor(self.high) + 1)
        if len(decades) >= 3:
            step = math.ceil(len(decades) / 6)
            return [10.0**decade for decade in decades if decade % step == 0]
        return _round_multiples(10**self.low, 10**self.high)

    def line(self, values: Sequence[float], style: str) -> Iterator[str]:
        """`values` as one stroke for each run without a value that is not finite."""
        run: list[str] = []
        for index, value in enumerate([*values, math.nan]):
            if math.isfinite(value):
                run.append(f"{self.x(index):.1f},{self.y(value):.1f}")
            elif run:
                yield f'<polyline class="{style}" points="{" ".join(run)}"/>'
                run = []

    def points(self, one: Series) -> Iterator[str]:
        """A mark with a tooltip for each value."""
        for index, (value, place) in enumerate(zip(one.values, one.places, strict=True)):
            told = f"<title>{escape(place)}: {number(value)}</title>"
            x, alone = self.x(index), " np-alone" if self.count == 1 else ""
            if math.isfinite(value):
                spot = f'cx="{x:.1f}" cy="{self.y(value):.1f}" r="3"'
                yield f'<circle class="np-point{alone}" {spot}>{told}</circle>'
            else:
                cross = f"M{x - 4:.1f} {HEIGHT - _BOTTOM - 10}l8 8m0 -8l-8 8"
                yield f'<path class="np-broken" d="{cross}">{told}</path>'
