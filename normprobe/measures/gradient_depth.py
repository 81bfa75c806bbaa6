"""How the gradients of parameters go with depth, branches of one kind with each other, beside the closed form."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from normprobe import theory
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
    """The fields `stream`, `kinds`, `last_to_first`, `slope` and `expected` of a `GradientMeasure`.

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
    found: dict[str, list[_At]] = {}
    for one in branches:
        if one.stream == longest.name and one.parameters:
            add = longest.branches[one.branch].add
            found.setdefault(one.kind, []).append(_At(writes.index(add), one.parameter_norm))
    slope, spans = _slope(found), {kind: ats[-1].write - ats[0].write for kind, ats in found.items() if len(ats) > 1}
    law = _law(longest, residual, list(spans.values())) if untrained and not math.isnan(slope) else None
    kinds = tuple(
        KindGradients(
            kind=kind,
            branches=len(ats),
            span=spans.get(kind, 0),
            last_to_first=ats[-1].norm / ats[0].norm if kind in spans and ats[0].norm else math.nan,
            expected=None if law is None or kind not in spans else math.exp(law.slope * spans[kind]),
        )
        for kind, ats in found.items()
    )
    ratio = _geometric_mean([kind.last_to_first for kind in kinds if kind.branches > 1])
    return {"stream": longest.name, "kinds": kinds, "last_to_first": ratio, "slope": slope, "expected": law}


def _geometric_mean(ratios: Sequence[float]) -> float:
    """NaN where there is none or one is NaN; 0 and ∞ as they are."""
    if not ratios or any(map(math.isnan, ratios)):
        return math.nan
    return math.prod(math.pow(ratio, 1 / len(ratios)) for ratio in ratios)


def _slope(found: Mapping[str, Sequence[_At]]) -> float:
    """Least squares of ln norm against the write, with one slope and a level for each kind.

    With the means of every kind taken off, Σ (x − x̄)(y − ȳ) / Σ (x − x̄)² over all kinds.
    """
    if not all(math.isfinite(at.norm) and at.norm > 0 for ats in found.values() for at in ats):
        return math.nan
    above, below = [], []
    for ats in found.values():
        middle = statistics.fmean(at.write for at in ats)
        mean = statistics.fmean(math.log(at.norm) for at in ats)
        above += [(at.write - middle) * (math.log(at.norm) - mean) for at in ats]
        below += [(at.write - middle) ** 2 for at in ats]
    spread = math.fsum(below)
    return math.fsum(above) / spread if spread else math.nan


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
