"""What a group of numbers stands on."""

from __future__ import annotations

from normprobe.records.base import Record


class Basis(Record):
    """What a group of numbers stands on.

    Attributes:
        unit: unit of the values ("1": the stream's own unit, "nat", "logit").
        dtype: dtype of the tensors that were measured; all statistics are taken in float32 or wider.
        count: number of tokens, rows or elements behind each value.
        exact: False where a seeded sample was taken.
    """

    unit: str
    dtype: str
    count: int
    exact: bool = True
