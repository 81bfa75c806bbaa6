"""The checks: what normprobe can say about a model, one file each."""

from normprobe.checks.base import Check, Limit, Needs, Outcome, SweepCheck, Unit, limit
from normprobe.checks.catalogue import ALL, documentation, explain, find, matching, rules, run
from normprobe.checks.configuration import load_settings
from normprobe.checks.judging import chosen_checks, judged, judged_sweep, placed, refuse_none

__all__ = [
    "ALL",
    "Check",
    "Limit",
    "Needs",
    "Outcome",
    "SweepCheck",
    "Unit",
    "chosen_checks",
    "documentation",
    "explain",
    "find",
    "judged",
    "judged_sweep",
    "limit",
    "load_settings",
    "matching",
    "placed",
    "refuse_none",
    "rules",
    "run",
]
