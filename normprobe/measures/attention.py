"""Attention logits, from q and k as they reach the kernel, or from the logits as they reach a softmax.

Dims: B batch (all leading axes), H query heads, K key heads, Q query rows, R sampled query rows, T keys, D
head width.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from normprobe.anatomy.attention.unseen import lowest_reached, unseen
from normprobe.capture.watch import Handler
from normprobe.measures.logits import Lengths, LogitStats, lengths, logit_stats, row_stats
from normprobe.measures.padding import fitting
from normprobe.records import AttentionMeasure, AttentionSite, Basis, HeadLogits, Margins

ROWS = 64  # query rows that are looked at
_NAMES = "sampled_max", "uncapped_max", "std", "entropy", "saturated", "first_token", "bound", "q_rms", "k_rms"
_MARGINS = "std", "entropy", "saturated", "first_token"
_PIECE = 4 * 2**20  # logits in one go
_LOWEST = -1e4  # where all logits are that low a mask hides them


@dataclass(frozen=True)
class _Operands:
    """What the logits of the sampled rows are made of; `mask` has 4 axes that broadcast to [B, H, R, T]."""

    q_BHRD: Tensor
    k_BKTD: Tensor
    scale: float
    mask: Tensor | None
    softcap: float | None = None


class LogitHandler(Handler):
    """Measures one attention site.

    All query rows are looked at where there are at most `ROWS` or `exact` asks for them, else a seeded sample of that
    many, one from each stretch of the sequence, the same for every head and sample. `bound` is max|q|·max|k|·|scale|
    over all rows, and the largest bias more where the mask adds one; where only the logits are seen (a softmax) it is
    the largest of all rows, which is exact.
    """

    def __init__(self, site: AttentionSite, seed: int, padding: Sequence[Tensor] = (), exact: bool = False) -> None:
        self.site, self.seed, self.padding, self.exact = site, seed, padding, exact
        self.length = 0
        self.measure: AttentionMeasure | None = None

    def before(self, arguments: Mapping[str, Any]) -> None:
        """Take the statistics from q and k, or from the logits where the operation is a softmax."""
        if "query" in arguments:
            self._from_product(arguments)
        else:
            self._from_logits(arguments)

    def _from_product(self, arguments: Mapping[str, Any]) -> None:
        if "scaled_dot_product" not in self.site.site.op:
            raise ValueError(f"the layout of q and k in {self.site.site.op} is not known")
        q = _four_axes(arguments["query"], self.site.heads)
        k = _four_axes(arguments["key"], q.shape[1])
        scale = arguments.get("scale")
        scale = q.shape[-1] ** -0.5 if scale is None else float(scale)
        bias = arguments.get("attn_mask", arguments.get("attn_bias"))
        rows = self._rows(q)
        mask = None if bias is None else _mask(bias, arguments["query"].shape[:-2], q.shape[:2])
        chosen = _with_causal(_take(mask, rows), rows, k.shape[2], bool(arguments.get("is_causal", False)))
        all_rows = lengths(q, k, scale)
        if mask is not None and mask.is_floating_point():
            biases = zip(all_rows.bound, _largest(mask, q.shape[1]), strict=True)
            all_rows = all_rows._replace(bound=tuple(b + most for b, most in biases))
        chosen = self._without_padding(chosen, q, rows)
        operands = _Operands(q.index_select(2, rows), k, scale, chosen, self.site.softcap)
        self._finish(operands, all_rows, q, rows)

    def _from_logits(self, arguments: Mapping[str, Any]) -> None:
        if not any(word in self.site.kernel for word in ("softmax", "aten.exp", "unknown")):
            raise ValueError(f"the weights are no softmax of the logits, {self.site.kernel} makes them")
        logits = arguments["self"]
        axis = arguments.get("dim", -1)  # none where each row's maximum is subtracted before the softmax
        if axis % logits.dim() != logits.dim() - 1:
            raise ValueError(f"softmax over axis {axis} of {logits.dim()}, expected the last")
        logits = _four_axes(logits, self.site.heads)
        rows = self._rows(logits)
        batch, heads, _, keys = logits.shape
        zeros = logits.new_zeros(1, dtype=torch.float32)  # q·k of 0, to which the logits are added as a bias
        operands = _Operands(
            zeros.expand(batch, heads, len(rows), 1),
            zeros.expand(batch, heads, keys, 1),
            1.0,
            self._without_padding(_hide(logits.index_select(2, rows)), logits, rows),
        )
        unknown = (None,) * heads
        self._finish(operands, Lengths(_largest(logits, heads), unknown, unknown), logits, rows)

    def _without_padding(self, mask: Tensor | None, source: Tensor, rows: Tensor) -> Tensor | None:
        """`mask` with nothing to see for the sampled rows that are padding, so that they are left out."""
        padding = fitting(self.padding, (source.shape[0], source.shape[2]))
        if padding is None:
            return mask
        hidden = padding.to(rows.device)[:, None, rows, None]
        if mask is None:
            return ~hidden
        return mask & ~hidden if mask.dtype is torch.bool else mask.masked_fill(hidden, -torch.inf)

    def _rows(self, x: Tensor) -> Tensor:
        self.length = count = x.shape[2]
        if self.exact or count <= ROWS:
            return torch.arange(count, device=x.device)
        return one_of_each(count, self.seed).to(x.device)

    def _finish(self, operands: _Operands, all_rows: Lengths, source: Tensor, rows: Tensor) -> None:
        share = len(rows) / max(1, source.shape[2])
        columns = [chain.from_iterable(parts) for parts in zip(*_statistics(operands, share), strict=True)]
        looked = source.shape[0] * len(rows)
        self.measure = AttentionMeasure(
            path=self.site.path,
            basis=Basis(
                unit="logit",
                dtype=str(source.dtype).removeprefix("torch."),
                count=looked,
                exact=len(rows) == source.shape[2],
            ),
            rows=looked,
            heads=tuple(_head(i, *row) for i, row in enumerate(zip(*columns, *all_rows, strict=True))),
        )


def one_of_each(count: int, seed: int) -> Tensor:
    """One row of each of `ROWS` stretches of `count` rows that are equally long, but for one row.

    What a row tells depends on how many keys it sees; such a sample is nearer to all rows than one from anywhere.
    """
    edges = torch.arange(ROWS + 1) * count // ROWS
    inside = torch.rand(ROWS, generator=torch.Generator().manual_seed(seed))
    return edges[:-1] + (inside * edges.diff()).long()


def _head(index: int, *numbers: Any) -> HeadLogits:
    """The record of one head from a row of `LogitStats` and `Lengths`."""
    told, margins, lengths = numbers[:6], numbers[6:10], numbers[10:]
    named = dict(zip(_NAMES, (*told, *lengths), strict=True))
    return HeadLogits(head=index, margins=Margins(**dict(zip(_MARGINS, margins, strict=True))), **named)


def _statistics(operands: _Operands, share: float) -> Iterator[LogitStats]:
    """Statistics of consecutive groups of heads, so many heads and rows in one go that their logits stay small."""
    q, k, mask = operands.q_BHRD, operands.k_BKTD, operands.mask
    key_heads, group = k.shape[1], q.shape[1] // k.shape[1]
    a_row = q.shape[0] * group * k.shape[2]
    height = max(1, min(q.shape[2], _PIECE // max(1, a_row)))
    step = max(1, _PIECE // max(1, a_row * height))
    for start in range(0, key_heads, step):
        stop = min(key_heads, start + step)
        heads = slice(start * group, stop * group)
        parts = []
        for row in range(0, q.shape[2], height):
            rows = slice(row, row + height)
            part = None if mask is None else _part(mask, heads, rows)
            parts.append(row_stats(q[:, heads, rows], k[:, start:stop], operands.scale, part, operands.softcap))
        yield logit_stats(parts, share)


def _part(mask: Tensor, heads: slice, rows: slice) -> Tensor:
    part = mask if mask.shape[1] == 1 else mask[:, heads]
    return part if part.shape[2] == 1 else part[:, :, rows]


def _four_axes(x: Tensor, heads: int) -> Tensor:
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


def _mask(mask: Tensor, lead: Sequence[int], batch_heads: Sequence[int]) -> Tensor:
    """`mask`, which broadcasts to [*lead, Q, T], with four axes that broadcast to [B, H, Q, T]."""
    if len(lead) == 1 and mask.dim() == 3 and mask.shape[0] > 1:
        return mask.reshape(*batch_heads, *mask.shape[1:])
    if mask.dim() > 4:
        return mask.expand(*lead[:-1], *mask.shape[-3:]).flatten(0, -4)
    return mask[(None,) * (4 - mask.dim())]


def _take(mask: Tensor | None, rows: Tensor) -> Tensor | None:
    """The sampled rows of a mask, −inf where it hides; a mask that is the same for all rows has one."""
    if mask is None:
        return None
    taken = mask if mask.shape[2] == 1 else mask.index_select(2, rows)
    return taken.masked_fill(unseen(taken), -torch.inf) if taken.is_floating_point() else taken


def _with_causal(mask: Tensor | None, rows: Tensor, keys: int, causal: bool) -> Tensor | None:
    """`mask` and, where `causal`, the rule that row i sees keys 0 … i, as torch has it."""
    if not causal:
        return mask
    seen = torch.arange(keys, device=rows.device) <= rows[:, None]
    if mask is None:
        return seen[None, None]
    return mask & seen if mask.dtype == torch.bool else mask.masked_fill(~seen, -torch.inf)


def _hide(logits: Tensor) -> Tensor:
    """Overwrites with −inf what a mask was added to: what lies below 0 and a gap that no logit of any row fills and
    that is as wide as those above it are spread; logits alone leave narrower ones, or wide ones in a few rows."""
    values = logits.flatten()
    top = values.amax(0, keepdim=True)
    if not bool(top.isfinite()):
        values = values.nan_to_num(0.0, 0.0, -torch.inf)
        top = values.amax(0, keepdim=True)
    top = top.clamp(min=_LOWEST)
    return logits.masked_fill_(logits < lowest_reached(values, top.clamp(max=0), top), -torch.inf)


def _largest(added: Tensor, heads: int) -> tuple[float, ...]:
    """The largest number of each head."""
    return tuple(added.amax((0, 2, 3)).float().expand(heads).tolist())
