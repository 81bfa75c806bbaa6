"""The parts of attention weights, and DeepNorm's β of the stream that each weight belongs to."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

from normprobe.records import Anatomy
from normprobe.rewrites.deepnorm import scales

PartName = Literal["q", "k", "v"]


@dataclass(frozen=True)
class Part:
    """Output features of a weight that make queries, keys or values; `name` is None for what is left."""

    name: PartName | None
    rows: tuple[int, ...]


def parts(anatomy: Anatomy) -> Mapping[str, tuple[Part, ...]]:
    """The parts of each weight of which the rows of some heads are known, in the order of their rows."""
    sizes = {site.parameter: site.shape[site.output_axis] for site in anatomy.weights}
    held: dict[str, dict[PartName, set[int]]] = {}
    for site in anatomy.attention:
        for name, columns in site.columns.items():
            spans = (span for head in columns.heads for span in head)
            rows = {row for start, stop in spans for row in range(start, stop)}
            held.setdefault(columns.parameter, {}).setdefault(name, set()).update(rows)
    return {name: tuple(_parts(held[name], sizes[name])) for name in held if name in sizes}


def _parts(held: Mapping[PartName, set[int]], size: int) -> Iterator[Part]:
    yield from sorted((Part(name, tuple(sorted(rows))) for name, rows in held.items() if rows), key=lambda p: p.rows)
    rest = set(range(size)).difference(*held.values())
    if rest:
        yield Part(None, tuple(sorted(rest)))


def unknown_readers(anatomy: Anatomy, known: Mapping[str, tuple[Part, ...]]) -> frozenset[str]:
    """Weights that attention reads its stream by, of which it is not known what all of their rows make."""
    weights = {site.parameter for site in anatomy.weights}
    kinds = ("attention", "cross_attention")
    branches = [b for stream in anatomy.streams for b in stream.branches if b.kind in kinds]
    readers = {name for branch in branches for name in branch.readers if name in weights}
    readers -= {name for branch in branches for name in branch.writers}
    return frozenset(n for n in {*readers, *known} if n not in known or any(p.name is None for p in known[n]))


def betas(anatomy: Anatomy) -> Mapping[str, float]:
    """DeepNorm's β for every weight of a branch; keys and values that come from outside have that of their queries."""
    of_stream = {index: scale.beta for index, scale in scales(anatomy).items()}
    found = {
        site.parameter: of_stream[site.stream]
        for site in anatomy.weights
        if site.stream is not None and {"reader", "writer", "inner"}.intersection(site.roles)
    }
    for attention in anatomy.attention:
        query = attention.columns.get("q")
        if query is not None and query.parameter in found:
            others = (attention.columns[name].parameter for name in attention.columns)
            found |= {name: found[query.parameter] for name in others if name not in found}
    return found
