"""How large attention logits can get at most, as the gains of norms on queries and keys imply."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from normprobe.records import AttentionSite
from normprobe.rewrites.qk.modules import HeadNorm


def logit_bound(query: HeadNorm, key: HeadNorm, heads: tuple[Sequence[int], Sequence[int]], scale: float) -> float:
    """Largest |logit| of any head, before a soft cap: |scale| · max |q| · max |k|, by Cauchy-Schwarz.

    Args:
        query: the norm of the queries.
        key: the norm of the keys.
        heads: the row of the norm that each head uses, of queries and of keys.
        scale: factor on q·k.
    """
    longest = [_of_heads(norm, rows) for norm, rows in zip((query, key), heads, strict=True)]
    if len(longest[0]) != len(longest[1]):  # which query head reads which key head is not told by the order
        longest = [each.amax().unsqueeze(0) for each in longest]
    return abs(scale) * float((longest[0] * longest[1]).amax())


def _of_heads(norm: HeadNorm, rows: Sequence[int]) -> Tensor:
    lengths = norm.longest()
    return lengths[list(rows)] if len(lengths) > 1 else lengths.expand(len(rows))


def in_words(site: AttentionSite, bound: float | None) -> str:
    """The bound in words."""
    if bound is None:
        return f"{site.path}: logits have no bound that the gains imply, since the factor on q·k is not constant"
    cap = "" if site.softcap is None else f", softly capped at {site.softcap:g} then"
    return f"{site.path}: |logit| <= {bound:.4g}, as the gains imply{cap}"
