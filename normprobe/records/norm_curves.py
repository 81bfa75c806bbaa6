"""What each norm does to the numbers of this input: its curve, how near that is to tanh, and its gain."""

from __future__ import annotations

from normprobe.records.base import Record
from normprobe.records.basis import Basis
from normprobe.records.norms import NormKind


class Gain(Record):
    """The gain of one norm (with the 1 of a stored w − 1), over its elements.

    Attributes:
        count: how many elements.
        mean, std, smallest, largest: of the elements with their signs; `std` divides by their number.
        negative: share below 0.
        tiny: share whose size is below a hundredth of the median size.
    """

    count: int
    mean: float
    std: float
    smallest: float
    largest: float
    negative: float
    tiny: float


class CurvePoint(Record):
    """Means over one of equally large groups of sampled elements, ordered by the input."""

    input: float
    output: float


class NormCurve(Record):
    """One norm, element by element: input x and output z, its gain and offset taken off where they are known.

    Attributes:
        path, kind: as in the Anatomy.
        basis: of the sampled elements, over all executions.
        points: the curve, by rising input.
        alpha, scale: of the `scale · tanh(alpha · x)` that is nearest to z by least squares; layer norms of trained
            transformers look like one (Zhu et al. 2025, sec. 3), and alpha is where Dynamic Tanh may start.
        tanh_fit: 1 − Σ(z − scale · tanh(alpha · x))² / Σz², 1 where it is one.
        linear_fit: the same for the nearest c · x; near `tanh_fit` where nothing bends.
        gain: None where the norm has none or it is stored in another form.
    """

    path: str
    kind: NormKind
    basis: Basis
    points: tuple[CurvePoint, ...]
    alpha: float
    scale: float
    tanh_fit: float
    linear_fit: float
    gain: Gain | None


class NormsMeasure(Record):
    """All norms that are modules, in the order of the Anatomy."""

    norms: tuple[NormCurve, ...]
