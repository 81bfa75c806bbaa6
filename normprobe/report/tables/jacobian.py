"""Tables of Jacobians."""

from __future__ import annotations

from collections.abc import Iterator

from normprobe.records import Measurements
from normprobe.records.jacobian import MeanSquare
from normprobe.report.tables.table import Table
from normprobe.report.wording import number, place, stretch


def make(measured: Measurements) -> Iterator[Table]:
    """One table: the output, then every stream as a whole and block by block."""
    found = measured.jacobian
    if found is None:
        return
    rows = [_row(f"{square.start} to {square.end}", square) for square in found.output]
    for chain in found.streams:
        steps = "layers" if chain.stream == "." else "blocks"
        if len(chain.blocks) > 1:
            rows.append(_row(f"{place(chain.stream)}, all {steps}", chain.whole))
        rows += [_row(stretch(one.block, one.until), one.square) for one in chain.blocks]
    caption = f"mean squared singular value, 1 keeps lengths; {found.probes} random probes, without padding"
    yield Table("Jacobians", caption, ("from input to output of", "mean σ²", "± standard error"), tuple(rows))


def _row(place: str, square: MeanSquare) -> tuple[str, str, str]:
    return place, number(square.value), number(square.standard_error)
