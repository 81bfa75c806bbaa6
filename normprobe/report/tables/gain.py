"""Tables of the gain of blocks."""

from __future__ import annotations

from collections.abc import Iterator

from normprobe.records import Measurements
from normprobe.records.gain import ChainGain
from normprobe.report.tables.table import Table
from normprobe.report.wording import number, place, plural, stretch


def make(measured: Measurements) -> Iterator[Table]:
    """One table a stream, its blocks in order, with what the gains make together in its caption."""
    for chain in () if measured.gain is None else measured.gain.streams:
        rows = [
            (
                stretch(one.block, one.until),
                _number(one.forward),
                _number(one.backward),
                number(one.rms_out),
                number(one.gradient_in),
            )
            for one in chain.blocks
        ]
        columns = ("block", "RMS out/in", "gradient in/out", "RMS out", "gradient in")
        yield Table(f"Gain of {place(chain.stream)}", _caption(chain), columns, tuple(rows))


def _caption(chain: ChainGain) -> str:
    sides = (("forward", chain.forward), ("backward", chain.backward))
    step = "layer" if chain.stream == "." else "block"
    said = [
        f"{side} ×{number(g.total)} over {plural(g.blocks, step)}, ×{number(g.per_block)} each on average"
        for side, g in sides
        if g is not None
    ]
    return "; ".join(said) or "a state or a gradient is 0 throughout"


def _number(value: float | None) -> str:
    return "-" if value is None else number(value)
