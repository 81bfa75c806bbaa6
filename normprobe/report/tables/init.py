"""How the weights were drawn, one row for each role."""

from __future__ import annotations

from collections.abc import Iterator

from normprobe.records import Measurements, RoleMeasure, WeightMeasure
from normprobe.report.tables.table import Table

_COLUMNS = ("role", "weights", "distribution", "std", "× √fan_in", "recipe")
_NAMED = 2  # recipes that one cell has room for


def make(measured: Measurements) -> Iterator[Table]:
    """The table of a model that does not look trained."""
    init = measured.init
    if init is None or init.trained is not False:
        return
    caption = "weights as they were drawn, medians of each role; recipes that fit nearly every weight of it"
    yield Table("Initialisation", caption, _COLUMNS, tuple(_row(role, init.weights) for role in init.roles))


def _row(role: RoleMeasure, weights: tuple[WeightMeasure, ...]) -> tuple[str, ...]:
    mixed = all(w.recipes for w in weights if role.role in w.roles)
    return (
        role.role,
        str(role.weights),
        ", ".join(role.distributions).replace("_", " "),
        f"{role.std[1]:.3g}",
        f"{role.gain[1]:.3g}",
        _names(role.recipes) or ("several" if mixed else "unknown"),
    )


def _names(recipes: tuple[str, ...]) -> str:
    more = len(recipes) - _NAMED
    named = ", ".join(recipes[:_NAMED])
    return f"{named} and {more} more" if more > 0 else named
