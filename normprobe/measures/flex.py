"""Logits that a function of the model's own makes of q·kᵀ (flex attention), a few heads and rows at a time.

Dims: B batch, H query heads, K key heads, Q query rows, R some of them, T keys, D head width.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from normprobe.capture.composites import scores
from normprobe.measures import logit_masks as masks
from normprobe.measures.logit_operands import PIECE, Operands, look
from normprobe.measures.logit_rows import ROWS
from normprobe.measures.logits import RowStats, joined, tops_seen
from normprobe.measures.scratch import Scratch


def look_at(
    arguments: Mapping[str, Any],
    rows: Tensor,
    padding_BQ: Tensor | None,
    first_B: Tensor | None,
    changed: bool,
    scratch: Scratch,
) -> RowStats:
    """What some query rows show.

    Args:
        arguments: of the call, by name.
        rows: their indices, [R].
        padding_BQ: True for queries to leave out; None: none.
        first_B: the first key of each sample that counts; None: 0.
        changed: whether the function caps or adds a bias: `uncapped` is then of scaled q·kᵀ.
        scratch: memory to use again.
    """

    def seen(heads: slice, some: Tensor) -> RowStats:
        logits, products = scores(arguments, some, heads)
        chosen = masks.rows_without_padding(masks.hide(logits), padding_BQ, some)
        told = look(Operands.of_logits(chosen, first_B), scratch)
        return told._replace(uncapped=tops_seen(products, chosen)) if changed else told

    pieces = torch.split(rows, ROWS)
    return joined([joined([seen(heads, some) for some in pieces], -1) for heads in _heads(arguments)], 1)


def largest(arguments: Mapping[str, Any], padding_BQ: Tensor | None) -> tuple[float, ...]:
    """The largest logit of each head over all rows; NaN where one is."""
    queries = arguments["query"]
    found: list[float] = []
    for heads in _heads(arguments):
        tops = [
            masks.largest(
                scores(arguments, some, heads)[0],
                heads.stop - heads.start,
                None if padding_BQ is None else padding_BQ[:, some],
            )
            for some in torch.split(torch.arange(queries.shape[2], device=queries.device), ROWS)
        ]
        found += torch.tensor(tops, device="cpu").amax(0).tolist()  # NaN wins
    return tuple(found)


def keeps_products(arguments: Mapping[str, Any]) -> bool:
    """Whether the function gives back the very score that it is given: the logits are scaled q·kᵀ then.

    One call tells of all places, since a function that torch maps over them cannot branch on their values.
    """
    score = torch.zeros((), device=arguments["query"].device)
    place = torch.zeros((), dtype=torch.long, device=score.device)
    return arguments["score_mod"](score, *(place,) * 4, *arguments.get("score_buffers", ())) is score


def _heads(arguments: Mapping[str, Any]) -> Iterator[slice]:
    """Query heads, so many in one go that `ROWS` rows of their logits are `PIECE` or fewer; at least those that share
    one key head."""
    queries, keys = arguments["query"], arguments["key"]
    heads, group = queries.shape[1], queries.shape[1] // keys.shape[1]
    size = queries.shape[0] * group * min(ROWS, queries.shape[2]) * keys.shape[2]
    step = group * max(1, PIECE // max(1, size))
    for start in range(0, heads, step):
        yield slice(start, min(heads, start + step))
