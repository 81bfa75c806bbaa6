"""What the logits of some query rows are made of, and a look at them a few heads and rows at a time.

Dims: B batch (all leading axes), H query heads, K key heads, R query rows, T keys, D head width, S logits of no key.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from normprobe.measures.logits import RowStats, joined, row_stats
from normprobe.measures.scratch import Scratch

PIECE = 4 * 2**20  # logits in one go


@dataclass(frozen=True)
class Operands:
    """What the logits of some rows are made of; `mask` has 4 axes that broadcast to [B, H, R, T], `first` is the
    first key of each sample that counts (None: 0), `sinks` are logits [B, H, R, S] of no key, `products` says that q·k
    are what the model multiplies."""

    q_BHRD: Tensor
    k_BKTD: Tensor
    scale: float
    mask: Tensor | None
    softcap: float | None = None
    first_B: Tensor | None = None
    sinks: Tensor | None = None
    products: bool = True

    @classmethod
    def of_logits(cls, logits_BHRT: Tensor, first_B: Tensor | None, sinks: Tensor | None = None) -> Operands:
        """Logits that are known, −inf where hidden, as a bias of q·k = 0."""
        batch, heads, rows, keys = logits_BHRT.shape
        zeros = logits_BHRT.new_zeros(1, dtype=torch.float32)
        q, k = zeros.expand(batch, heads, rows, 1), zeros.expand(batch, heads, keys, 1)
        return cls(q, k, 1.0, logits_BHRT, first_B=first_B, sinks=sinks, products=False)


def look(operands: Operands, scratch: Scratch) -> RowStats:
    """All rows of all heads, so many in one go that their logits stay small."""
    q, k, mask = operands.q_BHRD, operands.k_BKTD, operands.mask
    key_heads, group = k.shape[1], q.shape[1] // k.shape[1]
    a_row = q.shape[0] * group * k.shape[2]
    height = max(1, min(q.shape[2], PIECE // max(1, a_row)))
    step = max(1, PIECE // max(1, a_row * height))
    seen = partial(row_stats, first_B=operands.first_B, scratch=scratch, products=operands.products)
    looked = []
    for start in range(0, key_heads, step):
        stop = min(key_heads, start + step)
        heads = slice(start * group, stop * group)
        parts = []
        for row in range(0, q.shape[2], height):
            rows = slice(row, row + height)
            few, sunk = (None if each is None else _part(each, heads, rows) for each in (mask, operands.sinks))
            some = q[:, heads, rows], k[:, start:stop], operands.scale, few, operands.softcap
            parts.append(seen(*some, sinks=sunk))
        looked.append(joined(parts, -1))
    return joined(looked, 1)


def _part(mask: Tensor, heads: slice, rows: slice) -> Tensor:
    """The mask of these heads and rows; the mask itself where it is that of all."""
    part = mask if mask.shape[1] == 1 or heads.stop - heads.start == mask.shape[1] else mask[:, heads]
    return part if part.shape[2] == 1 or rows.stop - rows.start >= part.shape[2] else part[:, :, rows]
