"""What attention does with its logits: scales that are lost, queries that are too large (4xx)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from normprobe.records import Anatomy, AttentionSite
from tests.faults.edits import module_at, parameter, writing
from tests.faults.fault import Conditions, Fault, Site, fault
from tests.faults.operators.qk_norms import bare, change_operands

FORWARD = Conditions(level="forward")
LOUD = ("NP401", "NP402", "NP403", "NP404")  # what logits that are far too large deserve as well


def free(anatomy: Anatomy) -> list[Site]:
    """Sites of self-attention that nothing bounds, with rows of queries of their own and several keys a query."""
    several = [site for site in bare(anatomy) if site.detail.tokens is None or min(site.detail.tokens) > 3]
    softmax = [s for s in several if any(w in s.detail.kernel for w in ("softmax", "attention", "attn"))]
    return [s for s in softmax if s.detail.softcap is None and (s.detail.window or 99) > 3]


def loud(model: nn.Module, anatomy: Anatomy, factor: float) -> None:
    """The rows of all queries multiplied."""
    done: set[tuple[str, int]] = set()
    with writing():
        for site in free(anatomy):
            rows = site.detail.columns["q"]
            for start, stop in (span for head in rows.heads for span in head):
                if (rows.parameter, start) not in done:
                    done.add((rows.parameter, start))
                    parameter(model, rows.parameter).narrow(rows.axis, start, stop - start).mul_(factor)


def first_free(anatomy: Anatomy) -> list[Site]:
    """The first of them, where all sites are so."""
    found = free(anatomy)
    return found[:1] if len(found) == len(anatomy.attention) else []


@fault("query weights of ten thousand times their size: logits", "NP401", "warning", first_free, FORWARD)
def large_logits(model: nn.Module, anatomy: Anatomy, site: Site) -> None:
    loud(model, anatomy, 1e4)


@fault("query weights of ten thousand times their size: entropy", "NP402", "warning", first_free, FORWARD, LOUD)
def collapsed(model: nn.Module, anatomy: Anatomy, site: Site) -> None:
    loud(model, anatomy, 1e4)


@fault("query weights of ten thousand times their size: heads", "NP403", "warning", first_free, FORWARD, LOUD)
def saturated(model: nn.Module, anatomy: Anatomy, site: Site) -> None:
    loud(model, anatomy, 1e4)


def unbiased(anatomy: Anatomy) -> list[Site]:
    return [site for site in first_free(anatomy) if not any(s.biased for s in anatomy.attention)]


@fault("query weights of ten thousand times their size: advice", "NP405", "note", unbiased, FORWARD)
def unbounded(model: nn.Module, anatomy: Anatomy, site: Site) -> None:
    loud(model, anatomy, 1e4)


# ---- the factor on q·k


def scaled(anatomy: Anatomy) -> list[Site]:
    """Sites with a constant factor whose queries are an operand."""
    operated = [s for s in bare(anatomy) if s.detail.product is not None or s.detail.site.op == _WHOLE]
    return [s for s in operated if s.detail.scale is not None and s.detail.scale > 0 and not s.detail.biased]


_WHOLE = "scaled_dot_product_attention"


def usual(anatomy: Anatomy) -> list[Site]:
    """Of these the ones at 1/√d, of heads wide enough to tell."""
    return [
        s for s in scaled(anatomy) if abs(s.detail.scale * s.detail.head_dim**0.5 - 1) < 0.01 and s.detail.head_dim > 3
    ]


def multiply(model: nn.Module, site: AttentionSite, factor: Callable[[AttentionSite], float]) -> None:
    change_operands(model, site, "q", lambda x: x * factor(site))


def among_others(anatomy: Anatomy) -> list[Site]:
    """Of these the ones of which a stream has three or more, each a module of its own."""
    found = []
    for stream in anatomy.streams:
        blocks = tuple(f"{branch.block}." for branch in stream.branches)
        here = [site for site in usual(anatomy) if f"{site.path}.".startswith(blocks)]
        found += here if len({site.path for site in here}) == len(here) > 2 else []
    return found


@fault("the scale of one layer dropped", "NP404", "warning", among_others)
def dropped_once(model: nn.Module, anatomy: Anatomy, site: Site) -> None:
    multiply(model, site.detail, lambda one: one.head_dim**0.5)


def where_all(anatomy: Anatomy) -> list[Site]:
    found = usual(anatomy)
    paths = [site.path for site in found]
    whole = len(found) == len(anatomy.attention) and len(set(paths)) == len(paths)
    return found[:1] if whole else []


def wide(anatomy: Anatomy) -> list[Site]:
    """The same, where √d is far from 1."""
    return [site for site in where_all(anatomy) if site.detail.head_dim > 4]


def on_all(model: nn.Module, anatomy: Anatomy, factor: Callable[[AttentionSite], float]) -> None:
    for site in usual(anatomy):
        multiply(model, site.detail, factor)


@fault("the scale dropped in all layers", "NP404", "note", wide)
def dropped(model: nn.Module, anatomy: Anatomy, site: Site) -> None:
    on_all(model, anatomy, lambda one: one.head_dim**0.5)


@fault("the scale applied twice in all layers", "NP404", "note", wide, FORWARD)
def twice(model: nn.Module, anatomy: Anatomy, site: Site) -> None:
    on_all(model, anatomy, lambda one: one.head_dim**-0.5)


def of_many_heads(anatomy: Anatomy) -> list[Site]:
    """Where the root of all heads is far from that of one, and no form of another kind."""
    site = next(iter(where_all(anatomy)), None)
    return [site] if site is not None and site.detail.heads > 4 and site.detail.heads != site.detail.head_dim else []


@fault("the scale of all heads together", "NP404", "warning", of_many_heads, FORWARD)
def of_all_heads(model: nn.Module, anatomy: Anatomy, site: Site) -> None:
    on_all(model, anatomy, lambda one: one.heads**-0.5)


@fault("a learned scale that nothing bounds", "NP406", "note", usual)
def learned(model: nn.Module, anatomy: Anatomy, site: Site) -> None:
    holder = module_at(model, site.path)
    holder.register_parameter("planted", nn.Parameter(torch.zeros(())))
    held: Any = holder.get_parameter("planted")

    def scaled_by(x: Tensor) -> Tensor:
        return x * held.exp()

    change_operands(model, site.detail, "q", scaled_by)


ALL: tuple[Fault, ...] = (
    large_logits,
    collapsed,
    saturated,
    unbounded,
    dropped_once,
    dropped,
    twice,
    of_all_heads,
    learned,
)
