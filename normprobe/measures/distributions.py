"""Two outputs of one model compared: as distributions where they are logits, and as vectors.

Dims: N rows (tokens, or samples) that are no padding, V classes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from normprobe import stats
from normprobe.capture.outputs import named_tensors
from normprobe.measures.edits import WHOLE, Part
from normprobe.measures.main_output import main_output
from normprobe.measures.padding import fitting
from normprobe.measures.tokens import PIECE
from normprobe.records import Anatomy
from normprobe.records.depth import Effect


@dataclass(frozen=True)
class Reading:
    """What a model returned first, as rows; `logits` says whether a softmax over each row is a distribution."""

    rows: Tensor
    logits: bool

    @classmethod
    def of(cls, output: Any, anatomy: Anatomy, padding: Sequence[Tensor], part: Part = WHOLE) -> Reading | None:
        """The output's logits, by that name or by the anatomy's head; else its first tensor. None if there is none.

        Args:
            output: what the model returned.
            anatomy: tells whether the first output comes from a head.
            padding: masks of the tokens that are left out.
            part: the copy of the batch that is read.
        """
        found = main_output(output)
        if found is None:
            return None
        named = found is dict(named_tensors(output)).get("logits")
        found = part.of(found)
        logits = (named or anatomy.head is not None) and found.dim() in (2, 3) and found.shape[-1] > 1
        rows = found.detach().reshape(-1, found.shape[-1])
        mask = fitting(padding, (found.shape[0], found.shape[1])) if found.dim() == 3 else None
        return cls(rows if mask is None else rows[~mask.to(rows.device).flatten()], logits)


def compare(full: Reading, other: Reading) -> Effect:
    """How far `other` is from `full`."""
    both = full.logits and full.rows.numel() > 0
    return Effect(
        kl=kl(full.rows, other.rows) if both else None,
        agreement=float((full.rows.argmax(-1) == other.rows.argmax(-1)).double().mean()) if both else None,
        change=_change(full.rows, other.rows),
    )


def kl(p_NV: Tensor, q_NV: Tensor) -> float:
    """Mean over the rows of KL(p ‖ q) = Σ p (ln p − ln q) of two sets of logits, in nats; float64 inside, since
    float32 would give −1e-9 for equal ones.

    A class with p = 0 adds nothing, one with q = 0 alone makes it infinite; NaN in is NaN out.
    """
    step, total = max(1, PIECE // 4 // max(1, p_NV.shape[-1])), 0.0
    for start in range(0, len(p_NV), step):
        p, q = (x[start : start + step].double().log_softmax(-1) for x in (p_NV, q_NV))
        parts = (p.exp() * (p - q)).masked_fill(p == -torch.inf, 0.0)
        total += float(parts.sum())
    return total / len(p_NV)


def _change(full: Tensor, other: Tensor) -> float | None:
    """‖other − full‖ / ‖full‖; None where full is 0."""
    size = _norm(full)
    return None if size == 0 else _norm(stats.widen(other) - stats.widen(full)) / size


def _norm(x: Tensor) -> float:
    return float(torch.linalg.vector_norm(x, dtype=torch.float64))
