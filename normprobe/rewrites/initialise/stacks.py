"""The parts of attention weights, and DeepNorm's β of the stream that each weight belongs to."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

from normprobe.records import Anatomy, Stream
from normprobe.theory import deepnorm

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
    of_stream = _by_stream(anatomy)
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


def _by_stream(anatomy: Anatomy) -> Mapping[int, float]:
    """β by stream: of an encoder-decoder where one of two streams attends to the other, else of a stack alone.

    Layers are the blocks that write to the stream. Source: Wang et al. 2022 (DeepNet), fig. 2.
    """
    layers = {
        i: len({(branch.block, branch.layer) for branch in stream.branches}) for i, stream in enumerate(anatomy.streams)
    }
    decoders = [i for i, stream in enumerate(anatomy.streams) if _crosses(stream)]
    encoders = [i for i in layers if i not in decoders]
    if len(decoders) == 1 and len(encoders) == 1:
        both = deepnorm("encoder-decoder", encoder_layers=layers[encoders[0]], decoder_layers=layers[decoders[0]])
        return {encoders[0]: both["encoder"].beta, decoders[0]: both["decoder"].beta}
    return {i: deepnorm("encoder", encoder_layers=n)["encoder"].beta for i, n in layers.items()}


def _crosses(stream: Stream) -> bool:
    return any(branch.kind == "cross_attention" for branch in stream.branches)
