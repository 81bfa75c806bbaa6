"""Which repeated container each branch belongs to, and what a stream is called."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Located:
    """A branch for naming: where its add runs, what it mixes (tokens or channels), modules whose weights it uses."""

    path: str
    family: str
    modules: tuple[str, ...]


def block_names(branches: Sequence[Located]) -> list[str]:
    """The block of every branch of one stream.

    A block is a module whose last name is a number (a member of a list or sequence). Of the levels at which there is
    one, the deepest is taken at which all members hold the same sequence of branches that mix tokens or channels;
    where no level is so regular, the outermost that has more than one member. Branches outside every list are named
    by where they add.
    """
    anchors = [_anchor(branch) for branch in branches]
    depth = max((len(_levels(anchor)) for anchor in anchors), default=0)
    best: list[str] | None = None
    fallback: list[str] | None = None
    for level in range(depth):
        names = [_at(anchor, level, branch.path) for anchor, branch in zip(anchors, branches, strict=True)]
        if _regular(names, branches):
            best = names
        if fallback is None and len(set(names)) > 1:
            fallback = names
    return best or fallback or [branch.path for branch in branches]


def stream_name(blocks: Sequence[str]) -> str:
    """The container that holds the blocks: their common path without a number at its end; else the root, "."."""
    shared: list[str] = []
    for parts in zip(*(block.split(".") for block in blocks), strict=False):
        if len(set(parts)) > 1:
            break
        shared.append(parts[0])
    while shared and shared[-1].isdigit():
        shared.pop()
    return ".".join(shared) or "."


def _anchor(branch: Located) -> str:
    """The path that locates the branch: that of its add, or of its weights where the add runs outside every list."""
    if _levels(branch.path):
        return branch.path
    inner = [m for m in branch.modules if _levels(m)]
    return inner[-1] if inner else branch.path


def _levels(path: str) -> list[str]:
    """The prefixes of `path` that end in a number."""
    parts = path.split(".")
    return [".".join(parts[: i + 1]) for i, part in enumerate(parts) if part.isdigit()]


def _at(anchor: str, level: int, otherwise: str) -> str:
    levels = _levels(anchor)
    if not levels:
        return otherwise
    return levels[min(level, len(levels) - 1)]


def _regular(names: Sequence[str], branches: Sequence[Located]) -> bool:
    kinds: defaultdict[str, list[str]] = defaultdict(list)
    for name, branch in zip(names, branches, strict=True):
        kinds[name].append(branch.family)
    sequences = list(kinds.values())
    return len(sequences) > 1 and all(sequence == sequences[0] for sequence in sequences)
