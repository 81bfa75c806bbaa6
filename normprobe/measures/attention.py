"""Attention logits, from q and k as they reach the kernel, or from the logits as they reach a softmax.

Dims: B batch (all leading axes), H query heads, K key heads, Q query rows, R sampled query rows, T keys, D
head width.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from normprobe.capture.watch import Handler
from normprobe.measures import flex
from normprobe.measures import logit_masks as masks
from normprobe.measures.logit_operands import Operands, look
from normprobe.measures.logit_rows import sampled_rows
from normprobe.measures.logits import LogitStats, RowStats, joined, largest_of, largest_seen, logit_stats
from normprobe.measures.padding import fitting
from normprobe.measures.qk import QKHandler
from normprobe.measures.qk_norms import Lengths, Norms, norms
from normprobe.measures.scratch import Scratch
from normprobe.measures.together import Together
from normprobe.records import AttentionMeasure, AttentionSite, Basis, HeadLogits, Margins

_TOLD = "sampled_max", "uncapped_max", "std", "entropy", "saturated", "first_token", "sink"
_MARGINS = "std", "entropy", "saturated", "first_token", "sink"
_LENGTHS = "bound", "q_rms", "k_rms"


class Seen(NamedTuple):
    """What one site shows at once; the large tensors are gone afterwards.

    Attributes:
        rows: of the sampled query rows, which are this `share` of all.
        all_rows: tells what all rows show, from small tensors.
    """

    rows: RowStats
    share: float
    all_rows: Callable[[], Lengths]


Told = tuple[LogitStats, Lengths]


def alike(seen: Seen) -> Hashable:
    """Sites with equal keys can be told together, as if their heads were those of one."""
    top = seen.rows.top
    return top.shape[0], top.shape[2], top.dtype, top.device, seen.share


def tell(sites: Sequence[Seen]) -> list[Told]:
    """The statistics of sites that are alike."""
    every = logit_stats(joined([seen.rows for seen in sites], 1), sites[0].share)
    told, start = [], 0
    for seen in sites:
        stop = start + seen.rows.top.shape[1]
        told.append((LogitStats(*(column[start:stop] for column in every)), seen.all_rows()))
        start = stop
    return told


class LogitHandler(Handler):
    """Measures one attention site.

    All query rows are looked at where there are at most `logit_rows.ROWS` or `exact` asks for them, else a seeded
    sample of that many, one from each stretch of the sequence, the same for every head and sample. `bound` is
    max|q|·max|k|·|scale| over all rows, and the largest bias more where the mask adds one; where only the logits are
    seen (a softmax) or a function of the model's own changes q·k (flex) it is the largest of all rows, which is exact;
    for the latter every logit is computed once more, `flex.PIECE` in one go. Rows and keys that are padding are left
    out.
    """

    def __init__(
        self,
        site: AttentionSite,
        seed: int,
        padding: Sequence[Tensor] = (),
        exact: bool = False,
        together: Together[Seen, Told] | None = None,
        scratch: Scratch | None = None,
    ) -> None:
        self.site, self.seed, self.padding, self.exact = site, seed, padding, exact
        self.together, self.scratch = together or Together(tell, alike), scratch or Scratch()
        self.length = 0
        self._measure: AttentionMeasure | None = None
        self.failed: str | None = None
        self.changed = site.softcap is not None or site.biased
        self.qk = None if site.product is None else QKHandler(site.product, self.changed, self._sample)

    @property
    def measure(self) -> AttentionMeasure | None:
        """The numbers; None where the site was not seen, or could not be told for the reason `failed`."""
        self.together.finish()
        return self._measure

    def before(self, arguments: Mapping[str, Any]) -> None:
        """Take the statistics from q and k, or from the logits where the operation is a softmax."""
        if "score_mod" in arguments:
            self._from_scores(arguments)
        elif "query" in arguments and "scaled_dot_product" in self.site.site.op:
            self._from_product(arguments)
        elif "self" in arguments:
            self._from_logits(arguments)
        else:
            raise ValueError(f"the layout of q and k in {self.site.site.op} is not known")

    def _from_product(self, arguments: Mapping[str, Any]) -> None:
        q = masks.four_axes(arguments["query"], self.site.heads)
        k = masks.four_axes(arguments["key"], q.shape[1])
        scale = arguments.get("scale")
        scale = q.shape[-1] ** -0.5 if scale is None else float(scale)
        added = arguments.get("attn_mask", arguments.get("attn_bias"))
        rows, queries, keys = self._rows(q), self._padding(q), self._padding(k)
        mask = None if added is None else masks.four_axes_of_mask(added, arguments["query"].shape[:-2], q.shape[:2])
        causal = bool(arguments.get("is_causal", False))
        chosen = self._chosen(mask, rows, k.shape[2], causal)
        bias = masks.largest(mask, q.shape[1]) if mask is not None and mask.is_floating_point() else None
        found = norms(q, k, queries, keys)
        held = replace(found, queries=self.together.keep("q", found.queries), keys=self.together.keep("k", found.keys))
        all_rows = partial(_all_rows, held, scale, bias)
        chosen = masks.without_padding(chosen, queries, rows)
        operands = Operands(q.index_select(2, rows), k, scale, chosen, self.site.softcap, _first(keys))
        self._finish(look(operands, self.scratch), all_rows, q, rows, queries)

    def _chosen(self, mask: Tensor | None, rows: Tensor, keys: int, causal: bool) -> Tensor | None:
        """The sampled rows of a mask, and of that of causal attention."""
        if mask is None and causal:
            return self.scratch.made("causal", (rows, keys), lambda: masks.causal_mask(rows, keys))
        return masks.with_causal(masks.taken(mask, rows), rows, keys, causal)

    def _from_scores(self, arguments: Mapping[str, Any]) -> None:
        q, k = arguments["query"], arguments["key"]
        rows, queries, keys = self._rows(q), self._padding(q), self._padding(k)
        looked = flex.look_at(arguments, rows, queries, _first(keys), self.changed, self.scratch)
        all_rows = norms(q, k, queries, keys).lengths(float(arguments["scale"]))
        if len(rows) == q.shape[2]:
            all_rows = all_rows._replace(bound=largest_of(looked))
        elif not flex.keeps_products(arguments):
            all_rows = all_rows._replace(bound=flex.largest(arguments, queries))
        self._finish(looked, lambda: all_rows, q, rows, queries)

    def _from_logits(self, arguments: Mapping[str, Any]) -> None:
        if not any(word in self.site.kernel for word in ("softmax", "aten.exp", "unknown")):
            raise ValueError(f"the weights are no softmax of the logits, {self.site.kernel} makes them")
        logits = arguments["self"]
        axis = arguments.get("dim", -1)  # none where each row's maximum is subtracted before the softmax
        if axis % logits.dim() != logits.dim() - 1:
            raise ValueError(f"softmax over axis {axis} of {logits.dim()}, expected the last")
        logits = masks.four_axes(logits, self.site.heads)
        rows, sinks = self._rows(logits), None
        if self.site.sink_columns is not None:
            logits, sinks = _parted(logits, rows, self.site.sink_columns)
        queries, keys = self._padding(logits), self._padding(logits.mT)
        chosen = masks.rows_without_padding(masks.hide(logits.index_select(2, rows)), queries, rows)
        unknown = (None,) * logits.shape[1]
        rms = (unknown, unknown) if self.qk is None else self.qk.rms(logits, queries, keys)
        all_rows = Lengths(masks.largest(logits, logits.shape[1], queries), *rms)
        looked = look(Operands.of_logits(chosen, _first(keys), sinks), self.scratch)
        uncapped = self._uncapped(chosen)
        kept = masks.grid(chosen, None if self.qk is None else self.qk.dtype)
        self._finish(looked, lambda: all_rows, logits, rows, queries, sinks is not None, uncapped, kept)

    def _uncapped(self, chosen_BHRT: Tensor) -> tuple[float | None, ...] | None:
        """The largest scaled q·kᵀ of the sampled rows; None where neither a soft cap nor a bias follows."""
        if not self.changed:
            return None
        rows = None if self.qk is None else self.qk.rows(chosen_BHRT.shape[1])
        if rows is None or rows.shape != chosen_BHRT.shape:
            return (None,) * chosen_BHRT.shape[1]
        return largest_seen(rows, chosen_BHRT)

    def _padding(self, x_BHNC: Tensor) -> Tensor | None:
        found = fitting(self.padding, (x_BHNC.shape[0], x_BHNC.shape[2]))
        return None if found is None else found.to(x_BHNC.device)

    def _sample(self, count: int) -> Tensor:
        return sampled_rows(count, self.seed, self.exact)

    def _rows(self, x_BHNC: Tensor) -> Tensor:
        self.length = x_BHNC.shape[2]
        return self._sample(self.length).to(x_BHNC.device)

    def _finish(
        self,
        looked: RowStats,
        all_rows: Callable[[], Lengths],
        source: Tensor,
        rows: Tensor,
        padding_BQ: Tensor | None,
        sinks: bool = False,
        uncapped: tuple[float | None, ...] | None = None,
        grid: torch.dtype | None = None,
    ) -> None:
        count = source.shape[0] * len(rows) if padding_BQ is None else int((~padding_BQ[:, rows]).sum())
        every, dtype = source.shape[2], str(source.dtype).removeprefix("torch.")
        basis = Basis(unit="logit", dtype=dtype, count=count, exact=len(rows) == every)
        held = RowStats(*(self.together.keep(name, part) for name, part in looked._asdict().items()))
        kept = str(grid or source.dtype).removeprefix("torch.")
        seen = Seen(held, len(rows) / max(1, every), all_rows)
        self.together.add(seen, partial(self._tell, basis, kept, sinks, uncapped), self._refuse)

    def _refuse(self, why: str) -> None:
        self.failed = why

    def _tell(
        self, basis: Basis, grid: str, sinks: bool, uncapped: tuple[float | None, ...] | None, told: Told
    ) -> None:
        logits, all_rows = told
        columns: list[Sequence[float | None]] = list(logits)
        if uncapped is not None:
            columns[_TOLD.index("uncapped_max")] = uncapped
        if not sinks:
            columns[_TOLD.index("sink")] = columns[-1] = (None,) * len(columns[0])
        heads = tuple(_head(i, *row) for i, row in enumerate(zip(*columns, *all_rows, strict=True)))
        self._measure = AttentionMeasure(path=self.site.path, basis=basis, rows=basis.count, grid=grid, heads=heads)


def _all_rows(norms: Norms, scale: float, bias: Sequence[float] | None) -> Lengths:
    """What queries and keys tell of all rows, with the largest bias of each head."""
    told = norms.lengths(scale)
    return told if bias is None else told._replace(bound=tuple(map(sum, zip(told.bound, bias, strict=True))))


def _head(index: int, *numbers: Any) -> HeadLogits:
    """The record of one head from a row of `LogitStats` and `Lengths`."""
    names = (*_TOLD, *(f"{name}_margin" for name in _MARGINS), *_LENGTHS)
    known = dict(zip(names, numbers, strict=True))
    margins = Margins(**{name: known.pop(f"{name}_margin") for name in _MARGINS})
    return HeadLogits(head=index, margins=margins, **known)


def _first(padding_BT: Tensor | None) -> Tensor | None:
    """The first key of each sample that is no padding."""
    return None if padding_BT is None else (~padding_BT).byte().argmax(-1)


def _parted(logits: Tensor, rows: Tensor, sinks: tuple[int, int]) -> tuple[Tensor, Tensor]:
    """The logits of keys, and for the sampled rows those of no key, which lie at one end."""
    start, stop = sinks
    keys = logits[..., :start] if start else logits[..., stop:]
    return keys, logits[..., start:stop].index_select(2, rows)
