"""Tables of skipped branches and of readouts."""

from __future__ import annotations

import math
from collections.abc import Iterator

from normprobe.records import Measurements
from normprobe.records.depth import DepthMeasure, Effect
from normprobe.report.tables.table import Table
from normprobe.report.wording import number


def make(measured: Measurements) -> Iterator[Table]:
    """Branches that do least first; readouts by depth."""
    found = measured.depth
    if found is None:
        return
    columns = ("KL in nats", "same first choice", "change of output")
    if found.branches:
        ranked = sorted(found.branches, key=lambda one: _size(one.effect))
        rows = tuple((f"{one.path} ({one.kind})", *_row(one.effect)) for one in ranked)
        yield Table("Skipped branches", _caption(found), ("branch", *columns), rows)
    if found.readouts:
        rows = tuple((one.block, *_row(one.effect)) for one in found.readouts)
        yield Table("Readout by depth", "what the head says of earlier states", ("after", *columns), rows)


def _caption(found: DepthMeasure) -> str:
    of = "" if found.basis.exact else f"; a sample of {len(found.branches)} from {found.writes}"
    return "the output against that without the branch, those that do least first" + of


def _size(effect: Effect) -> float:
    told = effect.change if effect.kl is None else effect.kl
    return math.inf if told is None or math.isnan(told) else told


def _row(effect: Effect) -> tuple[str, str, str]:
    return _text(effect.kl), _text(effect.agreement), _text(effect.change)


def _text(value: float | None) -> str:
    return "-" if value is None else number(value)
