"""All measures that run only when they are asked for."""

from __future__ import annotations

from collections.abc import Sequence

from normprobe.measures.batchnorm import BatchNorm
from normprobe.measures.cost import Cost
from normprobe.measures.depth import Depth
from normprobe.measures.extra import Extra, Subject
from normprobe.measures.gain import Gain
from normprobe.measures.jacobian import Jacobian
from normprobe.measures.norms import Norms
from normprobe.measures.precision import Precision
from normprobe.measures.products import Products
from normprobe.measures.smoothness import Smoothness
from normprobe.records import Measurements, Skipped

EXTRAS: tuple[Extra, ...] = (
    Gain(),
    Jacobian(),
    Smoothness(),
    BatchNorm(),
    Depth(),
    Norms(),
    Products(),
    Cost(),
    Precision(),
)


def measure_extras(names: Sequence[str], subject: Subject) -> tuple[Measurements, tuple[Skipped, ...]]:
    """What the level measured, with the measures of these names added in the order of `EXTRAS`."""
    measured, skipped = subject.measured, list[Skipped]()
    for extra in EXTRAS:
        if extra.name in names or "all" in names:
            subject.tell(extra.name, 0, 0)
            found, unseen = extra.measure(subject)
            measured = measured.model_copy(update={extra.name: found})
            skipped += unseen
    return measured, tuple(skipped)
