"""The same forward in float32 and in half precision: relative errors, the first overflow, half-precision reductions."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, ClassVar, Literal, NamedTuple

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from normprobe import stats
from normprobe.capture.guard import untouched
from normprobe.measures.extra import Extra, Subject
from normprobe.measures.finite import first_broken_module
from normprobe.measures.origin import first_broken_operation
from normprobe.measures.snapshots import HALF, SAMPLED, Place, Sample, Snapshots, take
from normprobe.records import Anatomy, Basis, Skipped
from normprobe.records.extras import ExtraName
from normprobe.records.precision import HalfReduction, PlaceError, PrecisionMeasure, PrecisionPass


class _Way(NamedTuple):
    """How half precision comes about."""

    dtype: torch.dtype
    how: Literal["cast", "own", "autocast"]

    @property
    def name(self) -> str:
        return str(self.dtype).removeprefix("torch.")


class Precision(Extra):
    """One forward in float32, and one in each half precision that counts; two more where something is not finite.

    A model in half precision and one under autocast are tested as they run; one in float32 is cast to bfloat16 and to
    float16, parameters and buffers both, which takes their memory once more.
    """

    name: ClassVar[ExtraName] = "precision"

    def measure(self, subject: Subject) -> tuple[PrecisionMeasure | None, tuple[Skipped, ...]]:
        """Compare at every norm that is a module, every write and its stream, and the outputs."""
        ways = _ways(subject)
        skipped = [
            Skipped(what=f"precision of norm {norm.path}", why="it is no module, so that its output is not one tensor")
            for norm in subject.anatomy.norms
            if norm.executed and not norm.module
        ]
        subject.tell(self.name, 0, 1 + len(ways))
        try:
            with _cast(subject, torch.float32) as given:
                reference = take(given.model, given.inputs, given.anatomy, given.seed)
        except Exception as error:  # a cast that the model refuses, or its forward in another dtype
            why = f"the model does not run in float32: {type(error).__name__}: {error}"
            return None, (Skipped(what=self.name, why=why),)
        passes = []
        for done, way in enumerate(ways, 1):
            subject.tell(self.name, done, 1 + len(ways))
            try:
                tested, unseen = _tested(subject, way, reference)
            except Exception as error:  # such as an operation that has no kernel for this dtype
                why = f"the model does not run so: {type(error).__name__}: {error}"
                skipped.append(Skipped(what=f"precision in {way.name}", why=why))
            else:
                passes.append(tested)
                skipped += unseen
        basis = Basis(unit="1", dtype="float32", count=SAMPLED, exact=False)
        return PrecisionMeasure(basis=basis, passes=tuple(passes)) if passes else None, tuple(skipped)


def _ways(subject: Subject) -> list[_Way]:
    """The half precision that is in force, else both formats."""
    tensors = [t for t in subject.model.parameters() if t.is_floating_point()]
    device = tensors[0].device.type if tensors else "cpu"
    if torch.is_autocast_enabled(device):
        return [_Way(torch.get_autocast_dtype(device), "autocast")]
    own = next((t.dtype for t in tensors if t.dtype in HALF), None)
    return [_Way(own, "own")] if own is not None else [_Way(dtype, "cast") for dtype in reversed(HALF)]


@contextmanager
def _cast(subject: Subject, dtype: torch.dtype) -> Iterator[Subject]:
    """The model in `dtype` without autocast, and its floating inputs; the guard gives every tensor its memory back."""
    device = next((p.device.type for p in subject.model.parameters()), "cpu")
    inputs = pytree.tree_map_only(Tensor, lambda t: t.to(dtype) if t.is_floating_point() else t, subject.inputs)
    with untouched(subject.model), torch.no_grad(), torch.autocast(device, enabled=False):
        subject.model.to(dtype)
        yield Subject(subject.model, inputs, subject.anatomy, seed=subject.seed)


@contextmanager
def _way(subject: Subject, way: _Way) -> Iterator[Subject]:
    if way.how == "cast":
        with _cast(subject, way.dtype) as cast:
            yield cast
    else:
        yield subject


def _tested(subject: Subject, way: _Way, reference: Snapshots) -> tuple[PrecisionPass, list[Skipped]]:
    with _way(subject, way) as given:
        found = take(given.model, given.inputs, given.anatomy, given.seed)
        broken = any(not math.isfinite(sample.largest) for sample in found.samples.values())
        first = first_broken_module(given.model, given.inputs) if broken else None
        operation = None if first is None else first_broken_operation(given.model, given.inputs, first)
    skipped = [
        Skipped(what=f"precision in {way.name} at {site.path}#{site.op}:{site.ordinal}", why=why)
        for site, why in {**reference.missed, **found.missed}.items()
    ]
    tested = PrecisionPass(
        dtype=way.name,
        how=way.how,
        places=tuple(_places(subject.anatomy, found, reference)),
        first_non_finite=first,
        first_operation=None if operation is None else operation.operation,
        reductions=tuple(
            HalfReduction(path=one.path, op=one.op, dtype=one.dtype, calls=calls)
            for one, calls in found.reductions.items()
        ),
    )
    return tested, skipped


def _places(anatomy: Anatomy, found: Snapshots, reference: Snapshots) -> Iterator[PlaceError]:
    for place, sample in found.samples.items():
        exact = reference.samples.get(place)
        if exact is not None and exact.total == sample.total:
            yield _place(anatomy, place, sample, exact)


def _place(anatomy: Anatomy, place: Place, sample: Sample, exact: Sample) -> PlaceError:
    norm = anatomy.norm(place.path) if place.kind == "norm" else None
    return PlaceError(
        place=place.kind,
        path=place.path,
        execution=place.execution,
        **_branches(anatomy, place),
        dtype=sample.dtype,
        error=stats.relative_error([(sample.values, exact.values)]),
        largest=exact.largest,
        finite=math.isfinite(sample.largest),
        reduction=None if norm is None else norm.reduction,
        count=len(sample.values),
        exact=len(sample.values) == sample.total,
    )


def _branches(anatomy: Anatomy, place: Place) -> dict[str, Any]:
    """Which branches are added where a write or a stream was seen."""
    for stream in anatomy.streams:
        found = {index: one.kind for index, one in enumerate(stream.branches) if one.add == place.add}
        if found:
            return {"stream": stream.name, "branches": tuple(found), "kinds": tuple(found.values())}
    return {}
