"""How far logits before and after agree on the next token.

Dims: B batch, T tokens, V vocabulary.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from normprobe.rewrites.edits import PART


def next_tokens(before: Tensor, after: Tensor, ids: tuple[tuple[int, ...], ...]) -> dict[str, Any]:
    """KL and agreement where the output (B, T, V) stands over integer inputs (B, T)."""
    if before.dim() != 3 or tuple(before.shape[:2]) not in ids or before.shape[2] < 2:
        return {}
    rows, p, q = max(1, PART // before.shape[2]), before.flatten(0, 1), after.flatten(0, 1)
    starts = range(0, len(p), rows)
    return {
        "kl": float(torch.cat([_divergence(p[at : at + rows], q[at : at + rows]) for at in starts]).mean()),
        "agreement": float((before.argmax(-1) == after.argmax(-1)).double().mean()),
        "tokens": before.shape[0] * before.shape[1],
    }


def _divergence(before: Tensor, after: Tensor) -> Tensor:
    """KL(before ‖ after) of each row of logits, in float64."""
    p, q = before.double().log_softmax(-1), after.double().log_softmax(-1)
    return (p.exp() * (p - q)).sum(-1)
