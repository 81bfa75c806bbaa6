"""The runs of blocks that a stream consists of."""

from __future__ import annotations

from dataclasses import dataclass

from normprobe.records import Branch, Stream


@dataclass(frozen=True)
class Run:
    """One run of a block, with its writes to one stream."""

    name: str
    execution: int
    branches: tuple[Branch, ...]


def blocks_of(stream: Stream) -> list[Run]:
    """The runs of blocks of a stream in order; a block that is run again counts anew."""
    found: list[Run] = []
    runs: dict[str, int] = {}
    for branches in stream.blocks():
        name = branches[0].block
        found.append(Run(name, runs.get(name, 0), branches))
        runs[name] = runs.get(name, 0) + 1
    return found
