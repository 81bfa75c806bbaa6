"""What every product with a weight makes of its input's second moment."""

from __future__ import annotations

from normprobe.records.base import Record
from normprobe.records.basis import Basis
from normprobe.records.weights import WeightRole


class ProductGain(Record):
    """One product or convolution, in the first use of its weight.

    Attributes:
        parameter, roles: as in `Anatomy.weights`.
        gain: E[y²] / E[x²], x what goes in and y the product, without a bias; the padding of convolutions is included.
        basis: the entries of y behind it.
    """

    parameter: str
    roles: tuple[WeightRole, ...]
    gain: float
    basis: Basis


class ProductsMeasure(Record):
    """All products, in the order of `Anatomy.weights`; `overall` is the geometric mean of their gains."""

    products: tuple[ProductGain, ...]
    overall: float
