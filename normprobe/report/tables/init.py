"""How the weights were drawn, one row for each role."""

from __future__ import annotations

from collections.abc import Iterator

from normprobe.records import Initialisation, Measurements, RoleMeasure, WeightMeasure
from normprobe.report.tables.table import Table
from normprobe.report.wording import number

_COLUMNS = ("role", "weights", "distribution", "std", "× √fan_in", "× √fan_out", "E[f²]", "recipe")
_NAMED = 2  # recipes that one cell has room for


def make(measured: Measurements) -> Iterator[Table]:
    """The table; the caption alone where the weights do not look as they were drawn."""
    init = measured.init
    if init is None:
        return
    rows = tuple(_row(role, init.weights) for role in init.roles) if init.trained is False else ()
    yield Table("Initialisation", _caption(init), _COLUMNS, rows)


def _caption(init: Initialisation) -> str:
    if init.trained is not False:
        said = "the weights look trained" if init.trained else "whether the weights were trained could not be told"
        return "; ".join([said, *init.evidence])
    said = "weights as they were drawn, medians of each role"
    said += "; recipes that fit nearly every weight of it (normprobe explain recipes)"
    moment = "E[f²]: second moment behind the function that follows"
    return "; ".join(
        [said, moment, *([f"{' + '.join(map(str, init.writes))} writing branches"] if init.writes else [])]
    )


def _row(role: RoleMeasure, weights: tuple[WeightMeasure, ...]) -> tuple[str, ...]:
    held = [w for w in weights if role.role in w.roles]
    return (
        role.role,
        str(role.weights),
        ", ".join(role.distributions).replace("_", " "),
        number(role.std[1]),
        number(role.gain[1]),
        number(role.gain_back[1]),
        "-" if role.moment is None else number(role.moment[1]),
        _names(role.recipes) or ("several" if all(w.recipes for w in held) else "unknown"),
    )


def _names(recipes: tuple[str, ...]) -> str:
    more = len(recipes) - _NAMED
    named = ", ".join(recipes[:_NAMED])
    return f"{named} and {more} more" if more > 0 else named
