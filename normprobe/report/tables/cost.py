"""The table of what norms cost: the slowest first."""

from __future__ import annotations

from collections.abc import Iterator

from normprobe.records import Measurements
from normprobe.records.cost import CostMeasure, NormCost
from normprobe.report.tables.table import Table
from normprobe.report.wording import number

_COLUMNS = ("norm", "calls", "operations", "reductions", "bytes moved / needed", "fused", "share of forward")


def make(measured: Measurements) -> Iterator[Table]:
    """One row a norm."""
    found = measured.cost
    if found is None:
        return
    rows = sorted(found.norms, key=lambda norm: norm.seconds, reverse=True)
    yield Table("Cost of the norms", _caption(found), _COLUMNS, tuple(_row(norm, found) for norm in rows))


def _caption(found: CostMeasure) -> str:
    said = f"{found.share:.1%} of a forward on {found.device} ({number(1000 * found.forward_seconds)} ms)"
    if found.one_token_share is None or found.one_token_seconds is None:
        return said
    return f"{said}, {found.one_token_share:.1%} of one token ({number(1000 * found.one_token_seconds)} ms)"


def _row(norm: NormCost, found: CostMeasure) -> tuple[str, ...]:
    moved = number(norm.bytes_moved / norm.bytes_needed) if norm.bytes_needed else ""
    counts = (str(norm.calls), str(norm.operations), str(norm.reductions))
    return (norm.path, *counts, moved, "yes" if norm.fused else "no", f"{norm.seconds / found.forward_seconds:.2%}")
