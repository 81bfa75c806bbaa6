"""Streams that would be one if one more branch stood between them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise

from normprobe.records import Anatomy, Branch, Stream
from normprobe.records.anatomy import LAYER_KINDS
from normprobe.records.parts import whole

_NORMED = frozenset({"pre", "sandwich"})
_FEWEST = 3  # branches like the one that is missing


def gaps(anatomy: Anatomy) -> Iterator[tuple[Stream, tuple[Branch, ...]]]:
    """Streams that end in a norm, where weights alone follow before the next stream and both would be a row of blocks
    with one branch more between them; and the branches that it would be like."""
    shapes = {site.parameter: site.shape for site in anatomy.weights}
    for one, after in pairwise(anatomy.streams):
        if one.final_norm is None or not one.unskipped or one.width is None or one.width != after.width:
            continue
        equal = _like_the_missing(one.branches, after.branches)
        normed = all(b.placement in _NORMED and b.kind in LAYER_KINDS for b in equal)
        if len(equal) >= _FEWEST and normed and _shapes(one.unskipped, shapes) == _shapes(equal[0].writers, shapes):
            yield one, equal


def _like_the_missing(first: Sequence[Branch], later: Sequence[Branch]) -> tuple[Branch, ...]:
    """The branches at the place in their blocks that one between two rows would have; none where both rows are no
    blocks, or need none between them."""
    row = [*(branch.kind for branch in first), None, *(branch.kind for branch in later)]
    at = len(first)
    for period in range(2, at + 1):
        places = [i for i in range(at % period, len(row), period) if i != at]
        kinds = {row[i] for i in places}
        again = all(a == b or None in (a, b) for a, b in zip(row, row[period:], strict=False))
        if again and len(kinds) == 1 and later[0].kind not in kinds:
            branches = [*first, *later]
            return tuple(branches[i if i < at else i - 1] for i in places)
    return ()


def _shapes(names: Sequence[str], shapes: dict[str, tuple[int, ...]]) -> set[tuple[int, ...]]:
    """The shapes of the weights among some parameters."""
    held = (whole(name, shapes) for name in names)
    return {shapes[name] for name in held if name in shapes}
