"""How far logits before and after agree on the next token.

Dims: B batch, T tokens, V vocabulary.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from normprobe.rewrites.edits import PART


def next_tokens(before: Tensor | None, after: Tensor | None, ids: tuple[tuple[int, ...], ...]) -> dict[str, Any]:
    """KL and agreement where the output (B, T, V) stands over integer inputs (B, T), of the tokens whose logits are
    finite in both; empty without any."""
    if (
        before is None
        or after is None
        or before.dim() != 3
        or tuple(before.shape[:2]) not in ids
        or before.shape[2] < 2
    ):
        return {}
    rows, p, q = max(1, PART // before.shape[2]), before.flatten(0, 1), after.flatten(0, 1)
    found = [_compared(p[at : at + rows], q[at : at + rows]) for at in range(0, len(p), rows)]
    divergence, same = (torch.cat(each) for each in zip(*found, strict=True))
    if not len(same):
        return {}
    return {"kl": float(divergence.mean()), "agreement": float(same.mean()), "tokens": len(same)}


def _compared(before: Tensor, after: Tensor) -> tuple[Tensor, Tensor]:
    """KL(before ‖ after) of each row of logits that is finite in both, and 1 where its largest is the same, in
    float64."""
    finite = (before.isfinite() & after.isfinite()).all(-1)
    before, after = before[finite], after[finite]
    p, q = before.double().log_softmax(-1), after.double().log_softmax(-1)
    return (p.exp() * (p - q)).sum(-1), (before.argmax(-1) == after.argmax(-1)).double()
