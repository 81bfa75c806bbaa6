"""On which axis of a stream its features lie, at each write: maps may become rows of tokens and maps again."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

from normprobe.anatomy.flow.along import axes, given
from normprobe.anatomy.flow.replay import condensed, counted, sent
from normprobe.anatomy.flow.steps import Flow, Step
from normprobe.anatomy.flow.walk import moves_between
from normprobe.anatomy.streams.branches import Reading
from normprobe.records import NormSite


def feature_axes(flow: Flow, readings: Sequence[Reading], norms: Sequence[NormSite]) -> list[int | None]:
    """The axis of the features in the sum that each branch is added to, −1 for the last; None where it is not told.

    It is the one that the norm before the branch acts on; else that on which a product made what the trunk begins with,
    followed from write to write; else, where nothing is known of that, the one on which the writers put theirs.
    """
    known: dict[int, int] = {}
    for i, reading in enumerate(readings):
        output = reading.write.output
        if output not in known:
            axis = _normed(flow, reading, norms)
            axis = _along_trunk(flow, reading, known) if axis is None else axis
            axis = _written(flow, readings[i:]) if axis is None else axis
            if axis is not None:
                known[output] = axis
    found = [(known.get(r.write.output), len(flow.shape(r.write.output))) for r in readings]
    return [-1 if axis == rank - 1 else axis for axis, rank in found]


def _normed(flow: Flow, reading: Reading, norms: Sequence[NormSite]) -> int | None:
    """The one axis of the trunk that the norms before a branch act on."""
    found = {axis for norm in reading.norms.before for axis in _acted_on(flow, norm, reading.write.source, norms)}
    ranks = {len(flow.shape(v)) for v in (reading.write.source, reading.write.output)}
    return found.pop() if len(found) == 1 and len(ranks) == 1 and not reading.write.over else None


def _acted_on(flow: Flow, norm: Step, source: int, norms: Sequence[NormSite]) -> Iterator[int]:
    site = norms[norm.group.norm] if norm.group is not None else None
    moves = moves_between(flow, source, norm.inputs[0])
    if moves is None or site is None or len(site.axes) != 1 or site.batch_dependent:
        return
    for axis in range(len(flow.shape(source))):
        numbers = sent(flow, [(step.node, place) for step, place in moves], counted(flow.shape(source), axis))
        at = None if numbers is None or site.axes[0] >= numbers.dim() else site.axes[0] % numbers.dim()
        if numbers is not None and at is not None and condensed(numbers).shape[at] > 1:
            yield axis


def _along_trunk(flow: Flow, reading: Reading, known: Mapping[int, int]) -> int | None:
    trunk, shape = reading.write.trunk_input, flow.shape(reading.write.output)
    return None if flow.shape(trunk) != shape or given(flow, trunk, known) else _only_features(flow, trunk, known)


def _written(flow: Flow, readings: Sequence[Reading]) -> int | None:
    """The axis on which most writers to sums of the first one's shape put features; the last wins where as many mix
    tokens."""
    shape = flow.shape(readings[0].write.output)
    alike = [r.part.end for r in readings if flow.shape(r.part.end) == flow.shape(r.write.output) == shape]
    counts = Counter(axis for value in alike if (axis := _only_features(flow, value, {})) is not None)
    return max(counts, key=lambda axis: (counts[axis], axis), default=None)


def _only_features(flow: Flow, value: int, known: Mapping[int, int]) -> int | None:
    told = axes(flow, value, known) or ()
    found = [i for i, runs in enumerate(told) if runs.features]
    return found[0] if len(found) == 1 and not told[found[0]].places else None
