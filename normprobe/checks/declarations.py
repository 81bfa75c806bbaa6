"""What the checks share that hold a configuration against what was computed."""

from __future__ import annotations

from collections.abc import Sequence

from normprobe.records import Declared, ReportData
from normprobe.records.declared import Fact


def stated(data: ReportData, fact: Fact) -> list[Declared]:
    """All statements of one fact."""
    return [declared for declared in data.declared if declared.fact == fact]


def governs(declared: Declared, path: str, all_of: Sequence[Declared]) -> bool:
    """Whether a statement is about what lies at `path`: no configuration nearer to it states anything."""
    inside = [one.path for one in all_of if within(path, one.path)]
    return within(path, declared.path) and max(inside, key=_depth) == declared.path


def within(path: str, holder: str) -> bool:
    """Whether `path` is `holder` or lies in it."""
    return holder == "." or path == holder or path.startswith(f"{holder}.")


def _depth(path: str) -> int:
    return 0 if path == "." else path.count(".") + 1
