"""What the checks share that hold the blocks of a stream against each other."""

from __future__ import annotations

from typing import TypeAlias

from normprobe.checks.placement.trunk_norms import POST
from normprobe.records import Branch, Stream
from normprobe.records.anatomy import LAYER_KINDS

NORMED = frozenset({"pre", "output", "sandwich", *POST})
Block: TypeAlias = tuple[Branch, ...]


def equal_blocks(stream: Stream) -> list[list[Block]]:
    """The blocks of a stream, those with the same kinds of branches together."""
    found: dict[tuple[str, ...], list[Block]] = {}
    for block in stream.blocks():
        found.setdefault(tuple(branch.kind for branch in block), []).append(block)
    return list(found.values())


def counterparts(stream: Stream) -> list[list[Branch]]:
    """The branches of a stream that stand at the same place in blocks with the same kinds of branches."""
    return [list(place) for blocks in equal_blocks(stream) for place in zip(*blocks, strict=True)]


def unnormed(branch: Branch) -> bool:
    """Whether a branch of a known layer has neither norm at its ends nor a factor in its place."""
    free = branch.branch_scale.kind == "none" and branch.skip_scale == 1.0 and branch.skip == "identity"
    return branch.placement == "none" and branch.kind in LAYER_KINDS and free


def bare(branch: Branch) -> bool:
    """Whether it has no norms inside either that every way through it passes."""
    return unnormed(branch) and not branch.normed_inside
