"""How the gradients of parameters go with depth, branches of one kind with each other, beside the closed form."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from normprobe import stats, theory
from normprobe.records import BranchGradient, GradientLaw, KindGradients, Stream, StreamMeasure


class _At(NamedTuple):
    """The norm of a branch's gradient, and how many writes lie before it."""

    write: int
    norm: float


def by_depth(
    streams: Sequence[Stream],
    branches: Sequence[BranchGradient],
    residual: Sequence[StreamMeasure] = (),
    *,
    untrained: bool = False,
) -> dict[str, Any]:
    """What a `GradientMeasure` says of depth: `stream`, `until`, `kinds`, `last_to_first`, `slope`, `interval` and
    `expected`.

    Args:
        streams: the one with most branches is taken.
        branches: the gradients of all.
        residual: of the same forward; says how large its branches are.
        untrained: whether a closed form for weights at initialisation may stand beside them.
    """
    longest = max(streams, key=lambda stream: stream.depth, default=None)
    if longest is None:
        return {"last_to_first": math.nan, "slope": math.nan}
    writes = list(dict.fromkeys(branch.add for branch in longest.branches))
    until = _until(longest)
    found: dict[str, list[_At]] = {}
    for one in branches:
        if one.stream == longest.name and one.parameters and (until is None or one.branch <= until):
            add = longest.branches[one.branch].add
            found.setdefault(one.kind, []).append(_At(writes.index(add), one.parameter_norm))
    spans = {kind: ats[-1].write - ats[0].write for kind, ats in found.items() if len(ats) > 1}
    slope, interval = _slope(found)
    law = _law(longest, residual, list(spans.values())) if untrained and not math.isnan(slope) else None
    kinds = tuple(_kinds(found, spans, law))
    ratio = _geometric_mean([kind.last_to_first for kind in kinds if kind.branches > 1])
    fit = {"last_to_first": ratio, "slope": slope, "interval": interval}
    return {"stream": longest.name, "until": until, "kinds": kinds, **fit, "expected": law}


def _until(stream: Stream) -> int | None:
    """The last branch of the first write behind which the output takes features off the stream; None where it does so
    nowhere."""
    tapped = next((branch.add for branch in stream.branches if branch.tapped), None)
    return max((i for i, branch in enumerate(stream.branches) if branch.add == tapped), default=None)


def _kinds(
    found: Mapping[str, Sequence[_At]], spans: Mapping[str, int], law: GradientLaw | None
) -> Iterator[KindGradients]:
    for kind, ats in found.items():
        yield KindGradients(
            kind=kind,
            branches=len(ats),
            span=spans.get(kind, 0),
            last_to_first=ats[-1].norm / ats[0].norm if kind in spans and ats[0].norm else math.nan,
            expected=None if law is None or kind not in spans else math.exp(law.slope * spans[kind]),
        )


def _geometric_mean(ratios: Sequence[float]) -> float:
    """NaN where there is none or one is NaN; 0 and ∞ as they are."""
    if not ratios or any(map(math.isnan, ratios)):
        return math.nan
    return math.prod(math.pow(ratio, 1 / len(ratios)) for ratio in ratios)


def _slope(found: Mapping[str, Sequence[_At]]) -> tuple[float, tuple[float, float] | None]:
    """Least squares of ln norm against the write, with one slope and a level for each kind; and its 95 % interval.

    With the means of every kind taken off, b = Σ (x − x̄)(y − ȳ) / Σ (x − x̄)² over all kinds. The interval is by
    Student's t, with a degree of freedom less for each kind and one for the slope.
    """
    if not all(math.isfinite(at.norm) and at.norm > 0 for ats in found.values() for at in ats):
        return math.nan, None
    points: list[tuple[float, float]] = []
    for ats in found.values():
        middle = statistics.fmean(at.write for at in ats)
        mean = statistics.fmean(math.log(at.norm) for at in ats)
        points += [(at.write - middle, math.log(at.norm) - mean) for at in ats]
    spread, freedom = math.fsum(x * x for x, _ in points), len(points) - len(found) - 1
    if not spread:
        return math.nan, None
    slope = math.fsum(x * y for x, y in points) / spread
    if freedom < 1:
        return slope, None
    rest = math.fsum((y - slope * x) ** 2 for x, y in points)
    half = stats.student_t(0.95, freedom) * math.sqrt(rest / freedom / spread)
    return slope, (slope - half, slope + half)


def _law(stream: Stream, residual: Sequence[StreamMeasure], spans: Sequence[int]) -> GradientLaw | None:
    """The closed form for the placement over these spans; None where none is known."""
    if stream.placement not in ("pre", "post"):
        return None
    states = next((measure.states for measure in residual if measure.stream == stream.name), ())
    ratios = [state.write_ratio for state in states if math.isfinite(state.write_ratio)]
    size = statistics.median(ratios) if ratios else 1.0
    slope = theory.gradient_slope(stream.placement == "post", size)
    return GradientLaw(
        slope=slope,
        last_to_first=_geometric_mean([math.exp(slope * span) for span in spans]),
        branch_rms=size,
        source="Xiong et al. 2020, sec. 3",
    )
