"""Table of the steps against the gradient."""

from __future__ import annotations

from collections.abc import Iterator

from normprobe.records import Measurements
from normprobe.report.tables.table import Table
from normprobe.report.wording import number


def make(measured: Measurements) -> Iterator[Table]:
    """One row a step, with the constant in the caption."""
    found = measured.smoothness
    if found is None:
        return
    rows = tuple(
        (
            f"{number(step.distance / found.parameter_norm)} of ‖weights‖",
            number(step.lipschitz),
            "-" if step.cosine is None else number(step.cosine),
            number(step.loss),
        )
        for step in found.steps
    )
    constant = f"Lipschitz constant of the gradient along the step {number(found.lipschitz)}"
    caption = f"{constant}, the largest change / way; loss {number(found.value)}"
    columns = ("step against the gradient", "change / way", "cosine", "loss there")
    yield Table("Smoothness", caption, columns, rows)
