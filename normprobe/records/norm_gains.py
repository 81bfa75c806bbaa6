"""The stored gains and offsets of the norms, as they are used."""

from __future__ import annotations

from normprobe.records.base import Record


class Elements(Record):
    """The elements of one gain or offset as it is used: a gain stored as w and applied as 1 + w is 1 + w here.

    Attributes:
        parameter: what holds it; a parameter or a buffer.
        dtype: that it is stored in.
        count: how many elements.
        non_finite: how many are NaN or infinite; all other numbers are of the elements that are finite.
        zeros, negative: how many are exactly 0, and below 0.
        stored_negative: how many stored ones are below 0: of w, where 1 + w is used.
        subnormal: how many stored ones are not 0 and smaller than 2⁻¹²⁶, float32's smallest normal number.
        smallest, largest, median, mean, std: with their signs; NaN where none is finite. `std` divides by their number,
            and of an even number of elements the median is the lower of the two in the middle.
        typical: median of |x|, as above.
        peak: largest |x|, at flat index `peak_at`.
    """

    parameter: str
    dtype: str
    count: int
    non_finite: int
    zeros: int
    negative: int
    stored_negative: int
    subnormal: int
    smallest: float
    largest: float
    median: float
    mean: float
    std: float
    typical: float
    peak: float
    peak_at: int

    @property
    def constant(self) -> float | None:
        """The value that every element has; None where they differ or one is not finite."""
        return self.smallest if self.non_finite == 0 and self.smallest == self.largest else None


class NormGain(Record):
    """Gain and offset of the norm at `path`; None where it has none.

    Attributes:
        one_plus: whether the gain is stored as w and applied as 1 + w.
        start: what every element of the gain is in a fresh instance of the model's class, as it is applied; looked for
            where 1 + w is applied and one number other than 1. None where it was not, or is not one number.
        foldable: whether weights alone read the norm, so that its gain and offset can be multiplied into them and may
            have been (`FoldGains`); looked for where those of some norms are 1 and 0 and those of others are not. None
            where it was not.
        began: what a rewrite gave every element of the gain as it added it, as it is applied: in this process, or in
            the patched checkpoint that the model was loaded from. None where none did, or it gave several numbers.
    """

    path: str
    one_plus: bool
    start: float | None = None
    foldable: bool | None = None
    began: float | None = None
    gain: Elements | None
    offset: Elements | None
