"""The checks: what normprobe can say about a model, one file each."""

from normprobe.checks.base import Check, Limit, Needs, Outcome, Unit, limit
from normprobe.checks.catalogue import ALL, documentation, explain, find, rules, run

__all__ = [
    "ALL",
    "Check",
    "Limit",
    "Needs",
    "Outcome",
    "Unit",
    "documentation",
    "explain",
    "find",
    "limit",
    "rules",
    "run",
]
