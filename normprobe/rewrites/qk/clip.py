"""Clip the attention logits of single heads through the weights of their queries and keys."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import final

import torch
from torch import nn

from normprobe.capture.invoke import Inputs
from normprobe.errors import RewriteError
from normprobe.measures.forward import measure_signal
from normprobe.records import Anatomy
from normprobe.rewrites.base import Effect, Refusal, Rewrite, Site, Sites, Survey
from normprobe.rewrites.biases import Biases, find_biases
from normprobe.rewrites.edits import bytes_of
from normprobe.rewrites.qk.between import why_bent
from normprobe.rewrites.qk.copies import on_copies
from normprobe.rewrites.qk.heads import Rows, logits_of, own_keys, rows_of, scale, why_not

Head = tuple[str, int]  # path of the attention, number of the head
_ROUNDS = 8  # and one for each attention: clipping one layer moves the logits of later ones


@final
@dataclass(frozen=True)
class QKClip(Rewrite):
    """Heads whose largest attention logit on the given inputs exceeds a limit get smaller query and key weights.

    Calibrated: such a head's logits are multiplied by limit / largest, half of it (as a root) on the rows of its
    queries and half on those of its keys; where several heads share keys, on the queries alone. Every other row keeps
    its bits. All query rows are looked at, and what clipping one layer does to later ones is taken into account. The
    logits are those before a soft cap. Another function than before where a head was clipped: the proof says by how
    much.

    Source: Kimi Team 2025 (Kimi K2), sec. 2.1, where it runs after every step of training; here it runs once.

    Attributes:
        limit: largest logit that is left; 50 as NP401 has it.
    """

    usual = Effect.CALIBRATED
    limit: float = 50.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if not (math.isfinite(self.limit) and self.limit > 0):
            raise RewriteError("QKClip cannot be made", expected="a finite limit > 0", found=repr(self.limit))

    def describe(self) -> str:
        """What it does, in one line."""
        return f"scales queries and keys of heads whose logits exceed {self.limit:g} down to it"

    def sites(self, survey: Survey) -> Sites:
        """One site for every parameter of which rows are scaled; the factors are tried on copies of the weights."""
        if any(p.is_meta for p in survey.model.parameters()):
            raise RewriteError("QKClip has to measure the logits", expected="a model with weights", found="device meta")
        search = _Search.of(survey, self.limit)
        search.run()
        refused = tuple(Refusal(path, why) for path, why in search.refused.items())
        return Sites(tuple(_sites(search)), refused)

    def change(self, model: nn.Module, site: Site, undo: ExitStack) -> None:
        """Scale the rows of one parameter in place."""
        scale(model, site.detail, undo)

    def fit(self, model: nn.Module, sites: tuple[Site, ...], inputs: Inputs) -> None:
        """Measure again; nothing moves.

        Raises:
            RewriteError: a clipped head still exceeds the limit by more than rounding.
        """
        search = _Search.of(Survey.of(model, inputs), self.limit)
        clipped = {name for site in sites for name in site.touched}
        left = [(key, largest) for key, largest in search.over() if search.names(key[0])[0] in clipped]
        if left:
            (path, head), largest = left[0]
            raise RewriteError(
                f"QKClip did not take hold at {path}, head {head}",
                expected=f"logits up to {self.limit:g}",
                found=f"{largest:.6g}",
            )

    def confirm(self, sites: tuple[Site, ...], anatomy: Anatomy) -> None:
        """Nothing of the Anatomy changes; `fit` has held the logits against the limit."""
        return


class _Search:
    """Clips, measures, and clips again until every head that can be clipped is within the limit."""

    def __init__(self, survey: Survey, limit: float, reasons: dict[str, str | None]) -> None:
        self.survey, self.limit, self.reasons = survey, limit, reasons
        self.biases: Biases = find_biases(survey, dict(survey.model.named_parameters()))
        self.sites = {site.path: site for site in survey.anatomy.attention}
        self.heads: dict[Head, float] = {}  # what their logits are multiplied by
        self.refused: dict[str, str] = {}
        self.factors: dict[Rows, float] = {}

    @classmethod
    def of(cls, survey: Survey, limit: float) -> _Search:
        """With the reasons why the heads of a site cannot be clipped, by its path."""
        named = dict(survey.model.named_parameters())
        sites = survey.anatomy.attention
        return cls(survey, limit, {s.path: why_not(survey.anatomy, s, named) or why_bent(survey, s) for s in sites})

    def run(self) -> None:
        """Find the heads that are clipped, and the `factors` of their rows; they end at the limit, neither above nor,
        where clipping earlier layers has made their logits smaller, below it. An attention that does not get there is
        refused, the first one alone: those behind it may have moved because of it."""
        while (left := self._rounds()) is not None:
            path, told = left
            self.reasons[path] = f"no factors were found in {self._most} rounds: {told}"

    @property
    def _most(self) -> int:
        return _ROUNDS + len(self.sites)

    def _rounds(self) -> tuple[str, str] | None:
        """Search from the start, on copies of the weights; the first attention that is not at the limit in the end, and
        how far from it."""
        self.heads, self.factors = {}, {}
        names = [name for path, why in self.reasons.items() if why is None for name in self.names(path)]
        with on_copies(self.survey.model, names), ExitStack() as undo:
            for _ in range(self._most):
                off = dict(self._off())
                if not off:
                    return None
                for key, largest in off.items():
                    self.heads[key] = min(self.heads.get(key, 1.0) * self.limit / largest, 1.0)
                undo.close()  # factors act on the weights as they were
                self.factors = dict(self._rows())
                scale(self.survey.model, self.factors, undo)
            return next(((path, f"head {head} is at {value:.4g}") for (path, head), value in self._off()), None)

    def names(self, path: str) -> list[str]:
        """The parameters that make queries and keys of an attention that can be clipped, its query weight first."""
        columns = self.sites[path].columns
        made = [rows for side in "qk" if side in columns for rows in rows_of(columns[side], 0, self.biases)]
        return [rows.parameter for rows in made]

    def over(self, found: Sequence[tuple[Head, float]] | None = None) -> Iterator[tuple[Head, float]]:
        """Heads that can be clipped and whose largest logit is above the limit by more than rounding."""
        for key, largest in self._largest() if found is None else found:
            if largest > self.limit * (1 + self._rounding(key[0])):
                why = self.reasons.get(key[0])
                if why is None:
                    yield key, largest
                else:
                    self.refused[key[0]] = why

    def _off(self) -> Iterator[tuple[Head, float]]:
        """Those, and clipped ones that are below the limit by more than rounding."""
        found = list(self._largest())
        yield from self.over(found)
        for key, largest in found:
            if self.heads.get(key, 1.0) < 1 and largest < self.limit * (1 - self._rounding(key[0])):
                yield key, largest

    def _largest(self) -> Iterator[tuple[Head, float]]:
        survey = self.survey
        measured, _ = measure_signal(survey.model, survey.inputs, survey.anatomy, exact=True)
        for found in measured.attention:
            for head in found.heads:
                yield (found.path, head.head), head.sampled_max if head.uncapped_max is None else head.uncapped_max

    def _rounding(self, path: str) -> float:
        """Of the weights in their dtype, and of the sum over the features of a head in float32 or wider."""
        query = self.sites[path].columns.get("q")
        dtype = torch.float32 if query is None else self.survey.model.get_parameter(query.parameter).dtype
        if not dtype.is_floating_point:
            return 0.0
        summed = torch.finfo(torch.promote_types(dtype, torch.float32)).eps
        return 4 * (torch.finfo(dtype).eps + self.sites[path].head_dim * summed)

    def _rows(self) -> Iterator[tuple[Rows, float]]:
        for (path, head), clipped in self.heads.items():
            if clipped == 1:
                continue
            site = self.sites[path]
            both = own_keys(self.survey.anatomy, site)
            factor = math.sqrt(clipped) if both else clipped
            yield from ((rows, factor) for rows in rows_of(site.columns["q"], head, self.biases))
            if both:
                yield from ((rows, factor) for rows in rows_of(site.columns["k"], head, self.biases))


def _sites(search: _Search) -> Iterator[Site]:
    names = dict.fromkeys(rows.parameter for rows in search.factors)
    clipped = dict.fromkeys(path for (path, _), factor in search.heads.items() if factor < 1)
    for name in names:
        path, _, own = name.rpartition(".")
        mine = {rows: factor for rows, factor in search.factors.items() if rows.parameter == name}
        rows = sum(stop - start for each in mine for start, stop in each.spans)
        least = min(mine.values())
        change = f"{own}: {rows} rows times {least:.3g} to {max(mine.values()):.3g}"
        held = bytes_of(search.survey.model, (name,))
        logits = tuple(logits_of(each) for each in clipped if name in search.names(each))
        yield Site(path or ".", change, (name,), holds=logits, forward=False, undo_bytes=held, detail=mine)
