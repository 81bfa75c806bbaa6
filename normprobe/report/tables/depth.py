"""Tables of skipped branches and of readouts."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

from normprobe.records import Measurements
from normprobe.records.depth import DepthMeasure, Effect, SkippedBranch
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
        names = _names(found.branches)
        rows = tuple((names[one.stream, one.branch], *_row(one.effect)) for one in ranked)
        yield Table("Skipped branches", _caption(found), ("branch", *columns), rows)
    if found.readouts:
        runs = Counter(one.block for one in found.readouts)
        rows = tuple((_run(one.block, one.execution, runs), *_row(one.effect)) for one in found.readouts)
        yield Table("Readout by depth", "what the head says of earlier states", ("after", *columns), rows)


def _names(branches: Sequence[SkippedBranch]) -> dict[tuple[str, int], str]:
    """Each branch by the module where its add runs, or by its block where that add runs further out, with its kind;
    those of one name are numbered in the order in which they run."""
    named = [(one, f"{one.path if _inside(one.path, one.block) else one.block} ({one.kind})") for one in branches]
    runs = Counter(name for _, name in named)
    before: Counter[str] = Counter()
    found = {}
    for one, name in named:
        found[one.stream, one.branch] = _run(name, before[name], runs)
        before[name] += 1
    return found


def _inside(path: str, block: str) -> bool:
    return f"{path}.".startswith(f"{block}.")


def _run(name: str, execution: int, runs: Mapping[str, int]) -> str:
    return f"{name}, run {execution + 1}" if runs[name] > 1 or execution else name


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
