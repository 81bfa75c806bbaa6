"""The parts of attention weights, and the factors that DeepNorm and T-Fixup give the stream of each weight."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

from normprobe.records import Anatomy
from normprobe.rewrites.deepnorm import attends_outside, depth, scales

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
    """DeepNorm's β for every weight of a branch."""
    return _of_branches(anatomy, {index: scale.beta for index, scale in scales(anatomy).items()})


def t_fixup_factors(anatomy: Anatomy) -> Mapping[str, float]:
    """T-Fixup's factor for every weight of a branch and every table; of a stack alone that of an encoder.

    0.67 L^(−1/4) for the L layers of an encoder, (9 L)^(−1/4) for those of a decoder that attends to one, and for the
    tables of both (Huang et al. 2020, sec. 3.2).
    """
    crossing = [i for i, stream in enumerate(anatomy.streams) if attends_outside(stream)]
    layers = {i: depth(stream) for i, stream in enumerate(anatomy.streams)}
    factors = {i: (9 * n) ** -0.25 if i in crossing else 0.67 * n**-0.25 for i, n in layers.items()}
    tables = [(9 * layers[i]) ** -0.25 for i in crossing] or list(factors.values())[:1]
    found = dict(_of_branches(anatomy, factors))
    if tables:
        found |= {site.parameter: tables[0] for site in anatomy.weights if site.kind == "embedding"}
    return found


def _of_branches(anatomy: Anatomy, of_stream: Mapping[int, float]) -> Mapping[str, float]:
    """The value of its stream for every weight of a branch; keys and values that come from outside have that of their
    queries."""
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
