"""What is said below the curve of a residual stream, and of any curve, in facts."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import TypeAlias

from normprobe.records import Basis, MassiveActivation, StreamMeasure
from normprobe.report.wording import number, place, plural

Facts: TypeAlias = tuple[str, ...]
_MOST_MASSIVE = 3


def stream_captions(measure: StreamMeasure) -> tuple[Facts, ...]:
    """Growth, what the writes do to the stream, its tokens, its precision, and massive activations: a line each."""
    lines = (_growth(measure), _writes(measure), _tokens(measure), _precision(measure))
    return (*filter(None, lines), *_massive(measure.massive))


def basis_facts(basis: Basis) -> Facts:
    """What the numbers stand on: `n = 512`, `float32`, and that they are a sample where they are."""
    return f"n = {basis.count}", basis.dtype + ("" if basis.exact else ", sampled")


def largest(values: Sequence[float]) -> int:
    """Index of the largest value; the first that is not finite counts as larger than all."""
    for index, value in enumerate(values):
        if not math.isfinite(value):
            return index
    return max(range(len(values)), key=lambda index: values[index])


def spread(values: Sequence[float]) -> str:
    """`0.1 to 0.3`, one number where all are the same, and how many are not finite."""
    finite = [value for value in values if math.isfinite(value)]
    broken = len(values) - len(finite)
    ends = dict.fromkeys(number(end) for end in (min(finite), max(finite))) if finite else []
    return ", ".join(filter(None, (" to ".join(ends), f"{broken} not finite" if broken else "")))


def _growth(measure: StreamMeasure) -> Facts:
    growth = measure.growth
    peak = largest([state.abs_max for state in measure.states])
    stands_on = (
        f"entry {number(measure.entry_rms)}",
        f"largest |x| {number(measure.states[peak].abs_max)} after write {peak + 1}",
        *basis_facts(measure.basis),
    )
    broken = [state.path for state in measure.states if not state.finite]
    if broken:
        return (
            f"NOT FINITE after {plural(len(broken), 'write')}, first at {place(broken[0])}",
            "no exponent",
            *stands_on,
        )
    if math.isnan(growth.exponent):
        return "no exponent: it needs four writes with finite values", *stands_on
    low, high = growth.interval
    exponent = f"exponent {growth.exponent:.2f} (95 %: {low:.2f} to {high:.2f}; √L has 0.5)"
    fit = "no R²: all are equal" if math.isnan(growth.r_squared) else f"R² {growth.r_squared:.2f}"
    return exponent, fit, *stands_on


def _massive(found: Sequence[MassiveActivation]) -> Iterator[Facts]:
    """The largest ones in a line each, the others counted."""
    for one in sorted(found, key=lambda one: -abs(one.value))[:_MOST_MASSIVE]:
        last = f"–{one.last + 1}" if one.last != one.first else ""
        yield (
            f"massive: {number(one.value)} in channel {one.channel}, position {one.position}, "
            f"{'writes' if last else 'write'} {one.first + 1}{last}",
            f"{number(one.ratio)} × the median",
            f"{one.share:.0%} of its token's squared norm",
        )
    if len(found) > _MOST_MASSIVE:
        yield (f"and {plural(len(found) - _MOST_MASSIVE, 'more massive activation')}",)


def _writes(measure: StreamMeasure) -> Facts:
    """Sizes and directions of the writes beside the trunk that they are added to."""
    states = measure.states
    facts = (
        *_told("RMS over the trunk's", [state.write_ratio for state in states]),
        *_told("over the sum's", [state.write_share for state in states]),
        *_told("cosine with the trunk", [state.write_cosine for state in states]),
        *_told("turn in radians", [state.angle for state in states]),
        *_told("independent writes would end at", [measure.independent_rms]),
        *(f"{fact} of {len(states)}" for fact in _told("effective depth", [measure.effective_depth])),
    )
    return (f"writes: {facts[0]}", *facts[1:]) if facts else ()


def _tokens(measure: StreamMeasure) -> Facts:
    """How alike the tokens are, and the first one beside the others."""
    last = measure.states[-1]
    facts = (
        *_told("mean cosine", [state.token_cosine for state in measure.states]),
        *_told("stable rank", [state.stable_rank for state in measure.states]),
        *_told("RMS at the end of the first", [last.first_rms]),
        *_told("of the others", [last.other_rms]),
    )
    return (f"tokens: {facts[0]}", *facts[1:]) if facts else ()


def _precision(measure: StreamMeasure) -> Facts:
    """Room below the largest number of float16, and what rounding to bfloat16 loses."""
    room = () if measure.headroom is None else tuple(_told("float16 holds the largest |x|", [measure.headroom.float16]))
    lost = _told("share of a write that bfloat16 loses", [state.bf16_loss for state in measure.states])
    return (*(f"{fact} times" for fact in room), *lost)


def _told(label: str, values: Sequence[float]) -> Iterator[str]:
    """A spread of the values that are numbers, if there are any."""
    known = [value for value in values if not math.isnan(value)]
    if known:
        yield f"{label} {spread(known)}"
