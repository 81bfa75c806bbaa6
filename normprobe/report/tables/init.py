"""How the weights were drawn, one row for each role."""

from __future__ import annotations

from collections.abc import Iterator

from normprobe.records import Measurements, RoleMeasure
from normprobe.report.tables.table import Table

_COLUMNS = ("role", "weights", "distribution", "std", "std · √fan_in", "E[y²] / E[x²]", "recipe")


def make(measured: Measurements) -> Iterator[Table]:
    """The table of a model that does not look trained."""
    init = measured.init
    if init is None or init.trained:
        return
    known = "weights as they were drawn" if init.trained is False else "whether the weights were trained is not clear"
    caption = f"{known}; recipes that fit nearly every weight of a role"
    yield Table("Initialisation", caption, _COLUMNS, tuple(_row(role) for role in init.roles))


def _row(role: RoleMeasure) -> tuple[str, ...]:
    gain = role.second_moment_gain
    return (
        role.role,
        str(role.weights),
        ", ".join(role.distributions).replace("_", " "),
        _span(role.std),
        _span(role.gain),
        "–" if gain is None else f"{gain:.3g}",
        ", ".join(role.recipes) or "unknown",
    )


def _span(values: tuple[float, float, float]) -> str:
    low, middle, high = (f"{value:.3g}" for value in values)
    return middle if low == high else f"{middle} ({low} to {high})"
