"""A branch that is the sum of several: its summands, which may share what reads the stream and what writes to it."""

from __future__ import annotations

from collections.abc import Container, Iterator
from dataclasses import dataclass, field
from typing import get_args

from normprobe.anatomy.flow.ops import LIGHT, WEIGHTY, Role, base, joined_axis
from normprobe.anatomy.flow.steps import Flow, Step
from normprobe.anatomy.flow.walk import light_chain
from normprobe.anatomy.streams.parts import Part, bends, heavy, make_part, region_to
from normprobe.records.anatomy import BranchKind

_ATTENDING = frozenset({Role.SOFTMAX, Role.ATTENTION})
_MOST = len(get_args(BranchKind))  # of more summands some are of one kind, and those are one branch


@dataclass(eq=False)
class _Summand:
    """A value in a tree of sums: `sides` are what it is the sum of, `tail` the sum and what follows it up to the value,
    `own` the steps on which it depends and no summand beside it does, as far as no one of its sides owns them."""

    end: int
    above: _Summand | None = None
    depth: int = 0
    tail: frozenset[int] = frozenset()
    sides: tuple[_Summand, ...] = ()
    own: set[int] = field(default_factory=set)
    owns: bool = False  # weighty steps, with its sides
    learned: bool = False  # weighty steps with parameters, with its sides


def split(flow: Flow, source: int, part: Part, writes: Container[int]) -> list[Part]:
    """The independent branches whose sum is `part`; `part` itself where a summand has no weights of its own. They may
    share the projection that reads the stream, the one that writes to it, and the norm and the factor on their sum."""
    tree = _tree(flow, part, writes)
    if len(tree) > 1:
        _settle(flow, source, part, tree)
    summands = list(_independent(tree[0], frozenset(), shared=False))
    if len(summands) > _MOST:
        return [part]
    found = []
    for summand, tail in summands:
        side = make_part(flow, source, summand.end, region_to(flow, source, summand.end, part.region))
        side = part if summand is tree[0] else side
        for one in _joined(flow, source, side) or [side]:
            found.append(one if side is part else make_part(flow, source, part.end, one.region | tail))
    return sorted(found, key=lambda p: min(heavy(flow, p.region), default=-1)) if len(found) > 1 else found


def _tree(flow: Flow, part: Part, writes: Container[int]) -> list[_Summand]:
    """The sums at the end of a part and what they add, each after what it is added to."""
    tree, seen = [_Summand(part.end)], set[int]()
    for summand in tree:  # grows
        step, tail = _ending(flow, summand.end, part.region)
        if step is None or step.role is not Role.ADD or step.id in writes or len(step.inputs) != 2 or step.id in seen:
            continue
        seen.add(step.id)
        summand.tail = tail
        summand.sides = tuple(_Summand(v, summand, summand.depth + 1) for v in step.inputs)
        tree += summand.sides
    return tree


def _settle(flow: Flow, source: int, part: Part, tree: list[_Summand]) -> None:
    """Find what each summand owns: every step is of the smallest summand by which all its results go."""
    owners: dict[int, _Summand] = {}

    def give(value: int, owner: _Summand) -> None:
        if value != source:
            owners[value] = _common(owners[value], owner) if value in owners else owner

    for summand in tree:
        if not summand.sides:
            give(summand.end, summand)
    for index in sorted(part.region, reverse=True):
        step = flow.steps[index]
        for owner in (owners[v] for v in step.outputs if v in owners):
            for value in step.inputs:
                give(value, owner)
            if step.role in WEIGHTY:
                owner.own.add(index)
    for summand in reversed(tree):
        summand.owns = bool(summand.own) or any(s.owns for s in summand.sides)
        learned = any(flow.steps[i].parameters for i in summand.own)
        summand.learned = learned or any(s.learned for s in summand.sides)


def _common(one: _Summand, other: _Summand) -> _Summand:
    """The smallest summand that both are part of."""
    while one is not other:
        if one.depth >= other.depth and one.above is not None:
            one = one.above
        elif other.above is not None:
            other = other.above
    return one


def _independent(root: _Summand, tail: frozenset[int], shared: bool) -> Iterator[tuple[_Summand, frozenset[int]]]:
    """The summands that stand for themselves, with the steps behind each: of every sum whose sides have weights of
    their own, learned ones where they share others."""
    todo = [(root, tail, shared)]
    while todo:
        summand, tail, shared = todo.pop()
        shared = shared or bool(summand.own)
        if summand.sides and all(s.owns and (s.learned or not shared) for s in summand.sides):
            todo += [(side, tail | summand.tail, shared) for side in reversed(summand.sides)]
        else:
            yield summand, tail


def _ending(flow: Flow, value: int, region: frozenset[int]) -> tuple[Step | None, frozenset[int]]:
    """The step of a region behind which up to `value` there are no more than light steps and norms, and all of those;
    None where there is no other."""
    tail = set[int]()
    while (step := flow.made_by(value)) is not None and step.id in region:
        tail.add(step.id)
        if len(step.inputs) != 1 or (step.role is not Role.NORM and step.role not in LIGHT):
            return step, frozenset(tail)
        value = step.inputs[0]
    return None, frozenset(tail)


def _joined(flow: Flow, source: int, part: Part) -> list[Part]:
    """Attention and what runs beside it, where their features are joined and one writer projects both to the stream."""
    writer, _ = _ending(flow, part.end, part.region)
    if writer is None or writer.role is not Role.MATMUL or len(writer.inputs) != 1:
        return []
    *_, last = light_chain(flow, writer.inputs[0])
    join = flow.made_by(last.value)
    if join is None or base(join.node.op) != "aten.cat" or len(join.inputs) != 2:
        return []
    rank = len(flow.shape(last.value))
    sides = [region_to(flow, source, v, part.region) for v in join.inputs]
    attends = [any(flow.steps[i].role in _ATTENDING for i in side) for side in sides]
    if joined_axis(join.node, rank) != rank - 1 or all(attends) or not any(attends):
        return []
    if not all(bends(flow, s) and _weighed(flow, source, v, s) for v, s in zip(join.inputs, sides, strict=True)):
        return []
    tail = part.region - sides[0] - sides[1]
    return [make_part(flow, source, part.end, side | tail) for side in (sides if attends[0] else sides[::-1])]


def _weighed(flow: Flow, source: int, end: int, region: frozenset[int]) -> bool:
    """Whether every way from `source` to `end` meets a weighty step: else the writer reads the stream itself."""
    todo, seen = [end], {end}
    while todo:
        value = todo.pop()
        step = flow.made_by(value)
        if value == source:
            return False
        if step is not None and step.id in region and step.role not in WEIGHTY:
            fresh = [v for v in step.inputs if v not in seen]
            seen.update(fresh)
            todo += fresh
    return True
