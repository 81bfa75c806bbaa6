"""Queries and keys where attention is written out: they are seen at the product that comes before the softmax.

Dims: B batch, H query heads, Q query rows, R sampled query rows, T keys, D head width.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from normprobe import stats
from normprobe.capture.watch import Handler
from normprobe.measures.logit_masks import four_axes
from normprobe.measures.qk_norms import entry_rms
from normprobe.records.anatomy import QKProduct


class QKHandler(Handler):
    """Looks at the operands of one q·kᵀ, and keeps of it what the softmax that follows asks for.

    Args:
        product: where it is computed.
        changed: whether a soft cap or a bias follows: the sampled rows of the product are kept, as no softmax shows
            them.
        sample: the rows to keep, by the number of rows.
    """

    def __init__(self, product: QKProduct, changed: bool, sample: Callable[[int], Tensor]) -> None:
        self.product, self.changed, self.sample = product, changed, sample
        self.width = 0
        self.dtype: torch.dtype | None = None
        self._norms: tuple[Tensor, Tensor] | None = None
        self._rows: Tensor | None = None

    def before(self, arguments: Mapping[str, Any]) -> None:
        """Take the norms of all queries and keys."""
        q, k = [value for value in arguments.values() if isinstance(value, Tensor)][-2:]
        self.width = q.shape[-1]
        self._norms = stats.norms(q), stats.norms(k.mT)

    def after(self, arguments: Mapping[str, Any], output: Any) -> None:
        """Take the sampled rows of a product that will be changed, without what it is added to at once (`baddbmm`)."""
        self.dtype = output.dtype
        if self.changed and self.product.factor is not None:
            rows = self.sample(output.shape[-2]).to(output.device)
            found = stats.widen(output.detach().index_select(-2, rows))
            if "batch1" in arguments and (beta := arguments.get("beta", 1)):
                added = arguments["self"].detach().expand(output.shape).index_select(-2, rows)
                found = found - beta * stats.widen(added)
            self._rows = found * self.product.factor

    def rms(
        self, logits_BHQT: Tensor, queries_BQ: Tensor | None, keys_BT: Tensor | None
    ) -> tuple[tuple[float | None, ...], tuple[float | None, ...]]:
        """RMS of the entries of queries and keys, one number a head of these logits; None where they are not theirs.

        Args:
            logits_BHQT: what the product became.
            queries_BQ: True for queries that are padding, and `keys_BT` for keys; None: none is.
        """
        batch, heads, queries, keys = logits_BHQT.shape
        found = []
        for each, count, padding in zip(self._norms or (), (queries, keys), (queries_BQ, keys_BT), strict=False):
            shaped = four_axes(each[..., None], heads)[..., 0]
            if shaped.shape == (batch, heads, count):
                found.append(entry_rms(shaped, self.width, padding))
        unknown = (None,) * heads
        return (found[0], found[1]) if len(found) == 2 else (unknown, unknown)

    def rows(self, heads: int) -> Tensor | None:
        """The sampled rows [B, H, R, T] of scaled q·kᵀ before soft cap and bias; they are given once."""
        rows, self._rows = self._rows, None
        return None if rows is None else four_axes(rows, heads)
