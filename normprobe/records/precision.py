"""One forward in half precision against the same in float32."""

from __future__ import annotations

from typing import Literal

from normprobe.records.anatomy import BranchKind
from normprobe.records.base import Record
from normprobe.records.basis import Basis
from normprobe.records.norms import Reduction


class PlaceError(Record):
    """How far one tensor of the tested forward is from the reference.

    Attributes:
        place: "norm": what a norm gave; "write": what a branch adds to its stream; "stream": the stream after that add;
            "output": what the model returned.
        path: the norm, the module where the add runs, or the name of the output.
        execution: which of several at this path, in order of time.
        stream, branches, kinds: of a write and the stream after it: the stream, which of its branches are added there
            (indices of `Stream.branches`; several where they are merged first), and their kinds.
        dtype: of the tested tensor.
        error: ‖tested − reference‖ / ‖reference‖ (L2, float64) over the sampled elements; NaN where one is not finite.
        largest: largest |x| of the reference, over all elements.
        finite: whether all elements of the tested tensor are finite.
        reduction: where a norm reduces (as in the Anatomy); None for other places.
        count: how many elements were compared; `exact` where these are all.
    """

    place: Literal["norm", "write", "stream", "output"]
    path: str
    execution: int
    stream: str | None = None
    branches: tuple[int, ...] = ()
    kinds: tuple[BranchKind, ...] = ()
    dtype: str
    error: float
    largest: float
    finite: bool
    reduction: Reduction | None
    count: int
    exact: bool


class HalfReduction(Record):
    """An operation inside `path` that sums or averages half-precision numbers and gives half precision back, `calls`
    times. Inside one kernel torch may sum in float32; what comes out is rounded, and may have overflowed."""

    path: str
    op: str
    dtype: str
    calls: int


class PrecisionPass(Record):
    """One forward in half precision.

    Attributes:
        dtype: of the pass.
        how: "cast": a float32 model cast to `dtype`; "own": as the model is; "autocast": automatic mixed precision.
        places: in order of time.
        first_non_finite: the first module whose output is not finite though its inputs are; None where all is finite.
        first_operation: the operation in that module that made it; None where none could be told.
        reductions: in half precision, in order of time.
    """

    dtype: str
    how: Literal["cast", "own", "autocast"]
    places: tuple[PlaceError, ...]
    first_non_finite: str | None
    first_operation: str | None = None
    reductions: tuple[HalfReduction, ...]


class PrecisionMeasure(Record):
    """Forwards in half precision against one in float32 with the same weights; `basis.count` elements a place at most.

    A half model's weights are taken as they are: what rounding them once has cost is not in the errors.
    """

    basis: Basis
    passes: tuple[PrecisionPass, ...]
