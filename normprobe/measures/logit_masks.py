"""What stands between q·kᵀ and the softmax: masks, biases, padding; and logits whose masks are no longer apart.

Dims: B batch (all leading axes), H query heads, Q query rows, R sampled query rows, T keys.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from normprobe.anatomy.attention.unseen import lowest_reached, unseen

_LOWEST = -1e4  # where all logits are that low a mask hides them


def four_axes(x: Tensor, heads: int) -> Tensor:
    """`x` as [B, heads, rows, columns]: leading axes become one, heads joined with another axis are split.

    Raises:
        ValueError: if no axis holds the heads.
    """
    shape = tuple(x.shape)
    if x.dim() == 3 and shape[0] % heads == 0:
        return x.reshape(-1, heads, *shape[1:])
    if x.dim() >= 5 and shape[-3] != heads and shape[-4] * shape[-3] == heads:
        x = x.flatten(-4, -3)
    if x.dim() < 4:
        raise ValueError(f"expected four axes with {heads} heads, found shape {shape}")
    return x if x.dim() == 4 else x.flatten(0, -4)


def four_axes_of_mask(mask: Tensor, lead: Sequence[int], batch_heads: Sequence[int]) -> Tensor:
    """`mask`, which broadcasts to [*lead, Q, T], with four axes that broadcast to [B, H, Q, T]."""
    if len(lead) == 1 and mask.dim() == 3 and mask.shape[0] > 1:
        return mask.reshape(*batch_heads, *mask.shape[1:])
    if mask.dim() > 4:
        return mask.expand(*lead[:-1], *mask.shape[-3:]).flatten(0, -4)
    return mask[(None,) * (4 - mask.dim())]


def taken(mask: Tensor | None, rows: Tensor) -> Tensor | None:
    """The sampled rows of a mask, −inf where it hides; a mask that is the same for all rows has one."""
    if mask is None:
        return None
    part = mask if mask.shape[2] == 1 else mask.index_select(2, rows)
    return part.masked_fill(unseen(part), -torch.inf) if part.is_floating_point() else part


def causal_mask(rows: Tensor, keys: int) -> Tensor:
    """Which keys these rows see where row i sees keys 0 … i, [1, 1, R, T]."""
    return (torch.arange(keys, device=rows.device) <= rows[:, None])[None, None]


def with_causal(mask: Tensor | None, rows: Tensor, keys: int, causal: bool) -> Tensor | None:
    """`mask` and, where `causal`, the rule that row i sees keys 0 … i, as torch has it."""
    if not causal:
        return mask
    seen = causal_mask(rows, keys)
    if mask is None:
        return seen
    return mask & seen if mask.dtype == torch.bool else mask.masked_fill(~seen, -torch.inf)


def without_padding(mask: Tensor | None, padding_BQ: Tensor | None, rows: Tensor) -> Tensor | None:
    """`mask` with nothing to see for the sampled rows that are padding, so that they are left out."""
    if padding_BQ is None:
        return mask
    hidden = padding_BQ[:, None, rows, None]
    if mask is None:
        return ~hidden
    return mask & ~hidden if mask.dtype is torch.bool else mask.masked_fill(hidden, -torch.inf)


def grid(logits_BHRT: Tensor, product: torch.dtype | None) -> torch.dtype:
    """The dtype whose numbers the logits are: their own, or the half one of the product where all are numbers of it.

    Args:
        logits_BHRT: as they reach the softmax.
        product: dtype that q·kᵀ was computed in; None where it was not seen, when either half one may be it.
    """
    for half in [product] if product is not None else [torch.bfloat16, torch.float16]:
        if half.itemsize < logits_BHRT.dtype.itemsize and _rounded(logits_BHRT[:1, :, :1], half):
            return half if _rounded(logits_BHRT, half) else logits_BHRT.dtype
    return logits_BHRT.dtype


def _rounded(logits: Tensor, half: torch.dtype) -> bool:
    return torch.equal(logits.to(half).to(logits.dtype), logits)


def rows_without_padding(logits: Tensor, padding_BQ: Tensor | None, rows: Tensor) -> Tensor:
    """The logits of sampled rows, −inf for those that are padding."""
    return logits if padding_BQ is None else logits.masked_fill(padding_BQ[:, None, rows, None], -torch.inf)


def hide(logits: Tensor) -> Tensor:
    """Overwrites with −inf what a mask was added to: what lies below 0 and a gap that no logit of any row fills and
    that is as wide as those above it are spread; logits alone leave narrower ones, or wide ones in a few rows."""
    values = logits.flatten()
    top = values.amax(0, keepdim=True)
    if not bool(top.isfinite()):
        values = values.nan_to_num(0.0, 0.0, -torch.inf)
        top = values.amax(0, keepdim=True)
    top = top.clamp(min=_LOWEST)
    return logits.masked_fill_(logits < lowest_reached(values, top.clamp(max=0), top), -torch.inf)


def largest(added: Tensor, heads: int, padding_BQ: Tensor | None = None) -> tuple[float, ...]:
    """The largest number of each head, without the rows that are padding."""
    tops = added.amax(-1)
    if padding_BQ is not None:
        tops = tops.masked_fill(padding_BQ[:, None], -torch.inf)
    return tuple(tops.amax((0, 2)).float().expand(heads).tolist())
