"""What the second of two norms in a row does."""

from __future__ import annotations

from normprobe.records.base import Record
from normprobe.records.basis import Basis


class RepeatedNorm(Record):
    """A norm that stands right behind another one.

    Attributes:
        path, follows: the norm, and the one before it, as in `NormSite`.
        change: ‖y − x‖ / ‖x‖ of its output y and input x over all elements; NaN where all are 0.
    """

    path: str
    follows: str
    change: float
    basis: Basis
