"""What brings tokens together inside a branch: convolutions, scans, loops, products, means and fixed matrices."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence

from normprobe.anatomy.attention.ops import operands
from normprobe.anatomy.flow.along import along, factors, tokens_meet
from normprobe.anatomy.flow.ops import LIGHT, Role, base, joined_axis, slides
from normprobe.anatomy.flow.steps import Flow, Step
from normprobe.anatomy.flow.walk import argument_value, first_readers, light_chain

_SCANS = frozenset({"aten.cumsum", "aten.cumprod", "aten.logcumsumexp"})
_LOOP = 5  # positions read one by one that make a loop


def _features(flow: Flow, value: int, axis: int) -> bool:
    """Whether an axis holds the features of one place, and no other does: what runs along it mixes no tokens."""
    found = [along(flow, value, i) for i in range(len(flow.shape(value)))]
    axis %= len(found)
    own = found[axis]
    beside = [runs for i, runs in enumerate(found) if i != axis and (runs is None or runs.features)]
    return own is not None and own.features and not own.places and not beside


def sums_up(flow: Flow, steps: Sequence[Step]) -> bool:
    """Whether projections over one position are all that has weights, and a softmax over tokens weighs what they
    give."""
    weighted = [s for s in steps if s.role is Role.MATMUL and s.parameters]
    weighed = any(s.role is Role.SOFTMAX and not _of_features(flow, s) for s in steps)
    return weighed and bool(weighted) and all("convolution" in s.node.op for s in weighted)


def _of_features(flow: Flow, step: Step) -> bool:
    """Whether a step that takes one axis runs along features."""
    runs = along(flow, step.inputs[0], int(step.node.args[1]))
    return runs is not None and runs.features


def multiplies_tokens(flow: Flow, step: Step) -> bool | None:
    """Whether a product of two signals, or what weighs features by it, brings several tokens together; None where it
    cannot be told."""
    if step.role is Role.ATTENTION:
        given = operands(flow, step)
        return None if given is None else _meet(flow, *given[:2], -2)
    pair = factors(flow, step) if step.role is Role.MATMUL and not step.parameters else None
    return False if pair is None else _meet(flow, *pair, -1)


def _meet(flow: Flow, first: int, second: int, other: int) -> bool | None:
    """Whether tokens meet in a product, as they do where neighbours were put side by side before it."""
    met = tokens_meet(flow, first, second, other)
    return True if met is None and any(_unfolded(flow, v) for v in (first, second)) else met


def _unfolded(flow: Flow, value: int) -> bool:
    *_, last = light_chain(flow, value)
    step = flow.made_by(last.value)
    return step is not None and base(step.node.op) == "aten.im2col"


def scans(flow: Flow, step: Step) -> bool:
    """Whether a step sums or multiplies up along an axis that is not one of features; statistics apart, of which a norm
    takes one for each token."""
    return base(step.node.op) in _SCANS and not _of_features(flow, step) and not _counts(flow, step.inputs[0])


def _counts(flow: Flow, value: int) -> bool:
    """Whether a value is a mean, a sum or another statistic over features."""
    *_, last = light_chain(flow, value)
    step = flow.made_by(last.value)
    if step is None or step.role not in (Role.POOL, Role.REDUCE):
        return False
    axes = _reduced(flow, step)
    return bool(axes) and all((runs := along(flow, step.inputs[0], i)) is not None and runs.features for i in axes)


def _reduced(flow: Flow, step: Step) -> tuple[int, ...]:
    """The axes over which a statistic is taken."""
    rank = len(flow.shape(step.inputs[0]))
    if "pool" in step.node.op:
        return tuple(range(2, rank))
    given = step.node.args[1] if len(step.node.args) > 1 else step.node.kwargs.get("dim")
    if base(step.node.op) in ("aten.linalg_vector_norm", "aten.norm"):
        given = step.node.args[2] if len(step.node.args) > 2 else None
    axes = [given] if isinstance(given, int) else given
    return tuple(int(i) % rank for i in axes) if axes else tuple(range(rank))


def mixes_neighbours(flow: Flow, step: Step) -> bool:
    """Whether a step is a convolution whose kernel is wider than one position, or a sliding mean, and does not run over
    the features of each token."""
    if "convolution" in step.node.op:
        weight = argument_value(step.node.args[1])
        wide = [] if weight is None else [size > 1 for size in flow.shape(weight)[2:]]
    else:
        wide = [size > 1 for size in step.node.args[1]] if slides(step.node) else []
    value, rank = argument_value(step.node.args[0]) if any(wide) else None, len(wide)
    if value is None:
        return False
    first = len(flow.shape(value)) - rank
    return not all(_features(flow, value, first + i) for i, size in enumerate(wide) if size)


def transforms(flow: Flow, step: Step) -> bool:
    """Whether a step goes over to frequencies, along another axis than that of each token's features."""
    if base(step.node.op) not in ("aten._fft_r2c", "aten._fft_c2c"):
        return False
    return not all(_features(flow, step.inputs[0], int(axis)) for axis in step.node.args[1])


def gathers(flow: Flow, step: Step) -> bool:
    """Whether a statistic is taken over places, or a fixed matrix sums over them."""
    if step.role in (Role.POOL, Role.REDUCE):
        return any((runs := along(flow, step.inputs[0], i)) is not None and runs.places for i in _reduced(flow, step))
    if step.role is not Role.MATMUL or "convolution" in step.node.op or len(step.inputs) != 1:
        return False
    pair = [v for v in map(argument_value, step.node.args) if v is not None][-2:]
    if len(pair) < 2 or any(flow.levels.parameters(v) for v in pair if v not in step.inputs):
        return False
    axis = -1 if pair[0] in step.inputs else -2
    runs = along(flow, step.inputs[0], axis) if len(flow.shape(step.inputs[0])) > 1 else None
    return runs is not None and runs.places


def refines(flow: Flow, convolution: Step, region: frozenset[int]) -> bool:
    """Whether a convolution of each channel for itself is added to what it reads, inside its branch."""
    weight = argument_value(convolution.node.args[1])
    if slides(convolution.node) or weight is None or flow.shape(weight)[1] != 1:
        return False
    read = {link.value for link in light_chain(flow, convolution.inputs[0])}
    sums = first_readers(flow, convolution.outputs[0], region, LIGHT)
    beside = [{link.value for v in s.inputs for link in light_chain(flow, v)} for s in sums if s.role is Role.ADD]
    return len(beside) == len(sums) > 0 and all(not read.isdisjoint(values) for values in beside)


def loops(flow: Flow, steps: Sequence[Step]) -> bool:
    """Whether all positions of some value are read one by one, on an axis that is not one of features, and brought
    together before they are put side by side again."""
    reads: defaultdict[tuple[int, int], dict[int, int]] = defaultdict(dict)
    for step in steps:
        for axis, position, made in _positions(flow, step):
            reads[step.inputs[0], axis][made] = position
    for (value, axis), found in reads.items():
        count = len(set(found.values()))
        if count >= _LOOP and count == flow.shape(value)[axis] and _carried(steps, found):
            runs = along(flow, value, axis)
            if runs is None or not runs.features:
                return True
    return False


def _positions(flow: Flow, step: Step) -> Iterator[tuple[int, int, int]]:
    """The single positions that a step takes out of its input: axis, position and value of each."""
    name, args = base(step.node.op), step.node.args
    if name not in ("aten.select", "aten.slice", "aten.unbind", "aten.split") or len(step.inputs) != 1:
        return
    shape = flow.shape(step.inputs[0])
    if name == "aten.select":
        yield int(args[1]) % len(shape), int(args[2]) % shape[int(args[1])], step.outputs[0]
    elif name == "aten.slice":
        axis = joined_axis(step.node, len(shape))
        if flow.shape(step.outputs[0])[axis] == 1 < shape[axis] and len(args) > 2 and args[2] is not None:
            yield axis, int(args[2]) % shape[axis], step.outputs[0]
    elif name == "aten.unbind" or args[1] == 1:
        axis = joined_axis(step.node, len(shape)) if name == "aten.unbind" else int(args[2] if len(args) > 2 else 0)
        for value in step.outputs:
            yield axis % len(shape), step.node.outputs.index(value), value


def _carried(steps: Sequence[Step], positions: dict[int, int]) -> bool:
    """Whether a step other than a move reads what came from several positions."""
    behind = {value: frozenset({position}) for value, position in positions.items()}
    for step in steps:
        found = [behind[v] for v in step.inputs if v in behind]
        whole = frozenset[int]().union(*found)
        if len(whole) > 1 and step.role is not Role.MOVE:
            return True
        if found and len(whole) == 1:
            behind.update((v, whole) for v in step.outputs if v not in behind)
    return False


def doubles(flow: Flow, steps: Sequence[Step]) -> bool:
    """Whether a signal is shifted along the tokens by 1, 2, 4 and so on, until each has met all before it."""
    shifts: defaultdict[int, set[int]] = defaultdict(set)
    for step in steps:
        if base(step.node.op) != "aten.slice" or len(step.inputs) != 1:
            continue
        before, behind = flow.shape(step.inputs[0]), flow.shape(step.outputs[0])
        axis = joined_axis(step.node, len(before))
        if before[axis] > behind[axis] and not _of_features(flow, step):
            shifts[behind[axis]].add(before[axis] - behind[axis])
            shifts[before[axis]].add(before[axis] - behind[axis])
    return any(size > 2 and found >= {1 << i for i in range((size - 1).bit_length())} for size, found in shifts.items())
