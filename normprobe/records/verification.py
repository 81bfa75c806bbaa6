"""What `normprobe verify` found: a classic result, measured again."""

from __future__ import annotations

from normprobe.records.base import Record


class Verified(Record):
    """One number of a classic result.

    Attributes:
        id: its name, the same in every version.
        result: the classic result that it belongs to.
        claim: what is measured, in one line.
        measured: by normprobe's own measures, on a model built for this.
        expected: what theory or the stated source gives.
        tolerance: the largest |measured - expected| that is accepted, and why it is not smaller is in `source`.
        ok: whether it was; False where `measured` is not finite.
        source: where the expected number comes from.
        note: what else is to be seen, such as the spread over seeds.
    """

    id: str
    result: str
    claim: str
    measured: float
    expected: float
    tolerance: float
    ok: bool
    source: str
    note: str = ""
