"""The rows of weights and biases that make queries and keys of single heads, and factors on them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from normprobe.records import Anatomy, AttentionSite, HeadRows
from normprobe.rewrites.biases import Biases
from normprobe.rewrites.edits import set_values


@dataclass(frozen=True)
class Rows:
    """Rows of one head in one parameter: half-open ranges of `axis`."""

    parameter: str
    axis: int
    spans: tuple[tuple[int, int], ...]


def rows_of(columns: HeadRows, head: int, biases: Biases) -> Iterator[Rows]:
    """The rows of a head in its weight, and in the biases behind that."""
    spans = columns.heads[head]
    yield Rows(columns.parameter, columns.axis, spans)
    for bias in biases.get(columns.parameter, ()):
        yield Rows(bias.parameter, 0, spans)


def why_not(anatomy: Anatomy, site: AttentionSite, named: Mapping[str, Tensor]) -> str | None:
    """Why the logits of single heads cannot be scaled through weights; None where they can."""
    if sum(other.path == site.path for other in anatomy.attention) > 1:
        return "several attentions run there"
    query = site.columns.get("q")
    if query is None or len(query.heads) != site.heads:
        return "which rows of which weight make its queries could not be told"
    if query.parameter not in named or not named[query.parameter].dtype.is_floating_point:
        return f"{query.parameter} holds no plain numbers"
    if site.qk_norm is not None:
        return "its queries and keys are normed: their length is that of the norms' gains"
    if site.biased:
        return "something besides q·k is added to its logits, which no weight of q and k scales"
    others = [s.path for s in anatomy.attention if s is not site and s.columns.get("q") == query]
    return f"its queries come from the same weight as those of {others[0]}" if others else None


def logits_of(path: str) -> str:
    """What rewrites that set the size of the logits of the attention at `path` claim alike."""
    return f"logits of {path}"


def own_keys(anatomy: Anatomy, site: AttentionSite) -> bool:
    """Whether each head has a key head of its own, made by a weight that no other attention reads."""
    keys = site.columns.get("k")
    if keys is None or len(set(keys.heads)) != site.heads:
        return False
    return not any(s is not site and s.columns.get("k") == keys for s in anatomy.attention)


def scale(model: nn.Module, factors: Mapping[Rows, float], undo: ExitStack) -> None:
    """Multiply rows in place, each parameter written once; all other rows keep their bits."""
    for name in dict.fromkeys(rows.parameter for rows in factors):
        parameter = model.get_parameter(name)
        values = parameter.detach().clone()
        for rows, factor in factors.items():
            for start, stop in rows.spans if rows.parameter == name else ():
                part = values.narrow(rows.axis, start, stop - start)
                part.copy_(part.to(torch.promote_types(part.dtype, torch.float32)) * factor)
        set_values(parameter, values, undo)
