"""Lengths of all queries and keys of an attention site: a bound on its logits, and their RMS.

Dims: B batch, H query heads, K key heads, Q query rows, T keys, D head width.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from normprobe import stats


class Lengths(NamedTuple):
    """L2 norms of all queries and keys, a query head: the largest, and the RMS of their entries."""

    bound: tuple[float, ...]
    q_rms: tuple[float | None, ...]
    k_rms: tuple[float | None, ...]


@dataclass(frozen=True)
class Norms:
    """L2 norms of all queries [B, H, Q] and keys [B, K, T], 0 for those to leave out; they keep no large tensor.

    Attributes:
        width: D.
        queries_BQ: True for queries that are left out, and `keys_BT` for keys; None: none.
    """

    queries: Tensor
    keys: Tensor
    width: int
    queries_BQ: Tensor | None = None
    keys_BT: Tensor | None = None

    def lengths(self, scale: float | Tensor) -> Lengths:
        """max|q| · max|k| · |scale| a query head, by Cauchy-Schwarz a bound on |logit| before softcap; RMS of q and k.

        Args:
            scale: a number, or a tensor with one factor a head (any shape that holds H or one element).

        Returns:
            One number a query head; NaN where a row of the head has one.
        """
        group = self.queries.shape[1] // self.keys.shape[1]
        longest = self.queries.amax((0, 2)) * self.keys.amax((0, 2)).repeat_interleave(group)
        factor = scale.detach().abs().flatten().to(longest) if isinstance(scale, Tensor) else abs(scale)
        k_rms = entry_rms(self.keys, self.width, self.keys_BT)
        return Lengths(
            bound=tuple((longest * factor).tolist()),
            q_rms=entry_rms(self.queries, self.width, self.queries_BQ),
            k_rms=tuple(each for each in k_rms for _ in range(group)),
        )


def norms(q: Tensor, k: Tensor, queries_BQ: Tensor | None = None, keys_BT: Tensor | None = None) -> Norms:
    """The norms of all rows of q [B, H, Q, D] and k [B, K, T, D], any real dtype.

    Args:
        queries_BQ: True for queries to leave out, and `keys_BT` for keys; None: none.

    Raises:
        ValueError: if H is not a multiple of K.
    """
    heads, key_heads = q.shape[1], k.shape[1]
    if heads % key_heads:
        raise ValueError(f"{heads} query heads do not share {key_heads} key heads evenly")
    queries, keys = _left(stats.norms(q), queries_BQ), _left(stats.norms(k), keys_BT)
    return Norms(queries, keys, q.shape[-1], queries_BQ, keys_BT)


def entry_rms(norms_BHN: Tensor, width: int, padding_BN: Tensor | None = None) -> tuple[float, ...]:
    """RMS of the entries of the rows of each head that have these norms; NaN where no row is left."""
    batch, _, rows = norms_BHN.shape
    left = batch * rows if padding_BN is None else int((~padding_BN).sum())
    total = _left(norms_BHN, padding_BN).double().square().sum((0, 2))
    return tuple((total / (left * width) if left else total + math.nan).sqrt().tolist())


def _left(norms_BHN: Tensor, padding_BN: Tensor | None) -> Tensor:
    """The norms of rows that are no padding, 0 for the others."""
    return norms_BHN if padding_BN is None else norms_BHN.masked_fill(padding_BN[:, None], 0.0)
