"""Which repeated container each branch belongs to, and what a stream is called."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import TypeAlias

Named: TypeAlias = tuple[str, int | None]  # a block's path, and its number where that alone tells no block
_SHARE = 0.6  # share of the branches that must lie in alike members for a level to count as the repeated one


@dataclass(frozen=True)
class Located:
    """A branch for naming: where its add runs, what it mixes (its family), the modules whose weights it uses, and in
    which run of the module the add is."""

    path: str
    family: str
    modules: tuple[str, ...]
    execution: int = 0


def block_names(branches: Sequence[Located], ran: Collection[str]) -> list[Named]:
    """The block of every branch of one stream, and its number where modules don't tell the blocks apart.

    Blocks are the members of a repeated container: modules at one depth of the tree that hold the same sequence of
    branch families. The deepest such depth counts, under the shortest path that tells the members apart and is that
    of a module that ran (a list never does). Where no depth is so regular it is the deepest at which a module holds
    several branches, or whose modules share one parent, else the one module that holds them all (a block that is
    run again and again), else where each one adds. Where no depth is regular and the families of the branches repeat
    one sequence, each repetition is a block with a number.

    Args:
        branches: the branches in order of execution.
        ran: paths of all modules that ran.
    """
    if len({b.path for b in branches}) == 1 and len({(b.execution, b.family) for b in branches}) == len(branches):
        return [(branch.path, None) for branch in branches]
    anchors = _anchors(branches)
    best: list[str] | None = None
    gathered: list[str] | None = None
    siblings: list[str] | None = None
    for depth in range(1, max(len(a) for a in anchors) + 1):
        names = [".".join(a[:depth]) or "." for a in anchors]
        told = best is not None and _partition(names) == _partition(best) and best[0] in ran
        if len(set(names)) < 2 or told:
            continue
        if _regular(names, branches):
            best = names
        if len(set(names)) < len(names) and not _holders(names):
            gathered = names
        if all(len(a) >= depth for a in anchors) and len({a[: depth - 1] for a in anchors}) == 1:
            siblings = names
    if best is not None:
        return [(name, None) for name in best]
    shared = ".".join(_common(anchors))
    names = gathered or siblings or [shared if shared in ran else branch.path for branch in branches]
    return list(zip(names, _layers(branches, len(set(names)) == 1), strict=True))


def _layers(branches: Sequence[Located], together: bool) -> list[int | None]:
    """The number of the repetition of one sequence of families that each branch is in; None where they repeat none, or
    where the runs of their modules tell. `together`: all are in one module, so that a sequence of one counts."""
    families, count = [branch.family for branch in branches], len(branches)
    least = 1 if together else 2
    told = len({branch.execution for branch in branches}) > 1 or (not together and len(set(families)) == 1)
    for length in [] if told else range(least, count // 2 + 1):
        if count % length == 0 and families == families[:length] * (count // length):
            return [place // length for place in range(count)]
    return [None] * count


def stream_name(blocks: Sequence[str]) -> str:
    """The container that holds the blocks: their common path; the root is "."."""
    shared: list[str] = []
    split = [block.split(".") for block in blocks]
    for parts in zip(*split, strict=False):
        if len(set(parts)) > 1:
            break
        shared.append(parts[0])
    if len(shared) == len(split[0]) and len(set(blocks)) == 1:
        shared.pop()
    return ".".join(shared) or "."


def _anchors(branches: Sequence[Located]) -> list[tuple[str, ...]]:
    """The path that locates each branch: that of its add; that of its weights where all adds run in one module, or
    where an add runs in a module that neither holds the weights nor lies beside them (a norm that adds first)."""
    together = len(branches) > 1 and len({b.path for b in branches}) == 1
    anchors = []
    for branch in branches:
        add, weights = _parts(branch.path), _common([_parts(m) for m in branch.modules])
        apart = _common([add, weights]) not in (add, weights)
        anchors.append(weights if weights and (together or apart) else add)
    return anchors


def _parts(path: str) -> tuple[str, ...]:
    return () if path == "." else tuple(path.split("."))


def _common(paths: Sequence[tuple[str, ...]]) -> tuple[str, ...]:
    """The longest common beginning."""
    found: tuple[str, ...] = ()
    for parts in zip(*paths, strict=False):
        if len(set(parts)) > 1:
            break
        found = (*found, parts[0])
    return found


def _partition(names: Sequence[str]) -> list[int]:
    """Which positions share a name, whatever the names are."""
    first = {name: i for i, name in reversed(list(enumerate(names)))}
    return [first[name] for name in names]


def _holders(names: Collection[str]) -> set[str]:
    """Those of the names that others lie in."""
    around = {name[:at] for name in names for at, letter in enumerate(name) if letter == "."}
    return around.intersection(names)


def _regular(names: Sequence[str], branches: Sequence[Located]) -> bool:
    members: defaultdict[str, list[str]] = defaultdict(list)
    for name, branch in zip(names, branches, strict=True):
        members[name].append(branch.family)
    holders = _holders(members)
    alike = Counter(tuple(s) for name, s in members.items() if name not in holders)
    sequence, count = alike.most_common(1)[0]
    return count > 1 and count * len(sequence) >= _SHARE * len(branches)
