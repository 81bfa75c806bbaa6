"""The parameters behind weights that are computed at every forward, slice by slice."""

from __future__ import annotations

from normprobe.records.base import Record


class ComputedWeight(Record):
    """The slices of `parameter` whose sizes set the scale of a computed weight, as `Reparametrization` tells them.

    Attributes:
        path, parameter: as there.
        dtype: that the parameter is stored in.
        count: how many slices; `elements` is how many elements each has.
        non_finite: how many hold NaN or infinity; the numbers below are of the others.
        empty: how many have no size: a norm that is 0 in their own dtype, or, standardised, elements that differ by no
            more than rounding.
        smallest, median: of the sizes, `median` the lower one in the middle; NaN where no slice is finite.
        smallest_at: flat index of the slice with the smallest.
        gains: how many elements the gain has, 0 where there is none; `zero_gains` is how many are exactly 0.
    """

    path: str
    parameter: str
    dtype: str
    count: int
    elements: int
    non_finite: int
    empty: int
    smallest: float
    smallest_at: int
    median: float
    gains: int
    zero_gains: int
