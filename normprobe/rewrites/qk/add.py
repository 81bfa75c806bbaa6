"""Add norms on the queries and keys of attention sites, behind the projections that make them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Literal, final

import torch
from torch import nn

from normprobe.capture.invoke import Inputs
from normprobe.errors import RewriteError
from normprobe.records import Anatomy, AttentionSite, HeadRows
from normprobe.rewrites.base import ChosenRewrite, Effect, Refusal, Site, Sites, Survey, full_name, module_at
from normprobe.rewrites.edits import chosen
from normprobe.rewrites.qk.bound import in_words, logit_bound
from normprobe.rewrites.qk.calibrate import distil, head_rms
from normprobe.rewrites.qk.fitness import projection, why_not
from normprobe.rewrites.qk.heads import logits_of
from normprobe.rewrites.qk.modules import HeadNorm, Kind, NormedHeads
from normprobe.rewrites.swap import lay
from normprobe.rewrites.swap import why_not as class_stays

Axis = Literal["head", "full"]
Start = Literal["unit", "calibrated", "distilled"]
_NAMES = {"q": "q_norm", "k": "k_norm"}


@dataclass(frozen=True)
class Added:
    """One norm behind one projection: `rows` are the output features of each row that it norms, `heads` the row of each
    head of the attention."""

    attention: str
    part: Literal["q", "k"]
    rows: tuple[tuple[int, ...], ...]
    heads: tuple[int, ...]


@final
@dataclass(frozen=True)
class AddQKNorm(ChosenRewrite):
    """Norms on the queries and keys of every attention site that has none, before rotary embeddings.

    Breaking on a trained model: queries and keys of every token get one length, where the model has learned others
    (keys of the first token are far shorter in many models); the proof says what that does to the loss. The norms
    are children `q_norm` and `k_norm` of the projections that make queries and keys; the names of all other
    parameters stay, so that weights of the model without the norms still load. Logits are then at most
    d · scale · max |gain q| · max |gain k|.

    Source: Henry et al. 2020; Dehghani et al. 2023 (ViT-22B), sec. 2, for LayerNorm of each head.

    Attributes:
        kind: rmsnorm | layernorm | l2norm (with a learned length for each head).
        axis: "head" takes the statistic over each head, "full" over the features of all heads.
        start: of the gains: "unit" 1, to train from scratch; "calibrated" the median RMS of each head on the given
            inputs; "distilled" trains the gains from there, and nothing else, to give the outputs that the model had.
        shared: one gain for all heads of a site, as published checkpoints have it; else one for each head.
        steps: of the distillation.
        eps: inside the root.
        only: a pattern of paths of attention sites, or several.
    """

    usual = Effect.BREAKING
    kind: Kind = "rmsnorm"
    axis: Axis = "head"
    start: Start = "unit"
    shared: bool = False
    steps: int = 60
    eps: float = 1e-6

    def __post_init__(self) -> None:
        super().__post_init__()
        if not (0 < self.eps < 1 and self.steps > 0):
            found = f"eps {self.eps!r}, steps {self.steps!r}"
            raise RewriteError("AddQKNorm cannot be made", expected="0 < eps < 1, steps > 0", found=found)

    def describe(self) -> str:
        """What it does, in one line."""
        gains = {
            "unit": "gains 1",
            "calibrated": "gains calibrated",
            "distilled": f"gains distilled, {self.steps} steps",
        }
        return f"adds a {self.kind} over each {self.axis} on queries and keys, before rotary; {gains[self.start]}"

    def places(self, survey: Survey) -> Iterator[tuple[str, ...]]:
        """The attention sites."""
        return ((attention.path,) for attention in survey.anatomy.attention)

    def sites(self, survey: Survey) -> Sites:
        """One site for each projection that makes queries or keys of a site without norms."""
        found: dict[str, list[Added]] = {}
        refused = []
        for attention in survey.anatomy.attention:
            if not chosen(attention.path, self.only):
                continue
            why = why_not(survey, attention)
            if why is not None:
                refused.append(Refusal(attention.path, why))
                continue
            for added in self._added(attention):
                found.setdefault(projection(attention.columns[added.part]), []).append(added)
        return Sites(tuple(self._site(path, tuple(added)) for path, added in found.items()), tuple(refused))

    def _added(self, attention: AttentionSite) -> Iterator[Added]:
        parts: tuple[Literal["q", "k"], ...] = ("q", "k")
        for part in parts:
            heads = _features(attention.columns[part])
            rows = tuple(dict.fromkeys(heads))  # heads that share rows once
            if self.axis == "head":
                yield Added(attention.path, part, rows, tuple(rows.index(head) for head in heads))
            else:
                yield Added(attention.path, part, (tuple(i for row in rows for i in row),), (0,) * len(heads))

    def _site(self, path: str, added: tuple[Added, ...]) -> Site:
        told = ", ".join(f"{len(each.rows)} {each.part}" for each in added)
        names = tuple(full_name(path, f"{_NAMES[each.part]}.weight") for each in added)
        logits = tuple(dict.fromkeys(logits_of(each.attention) for each in added))
        return Site(path, f"{self.kind} over rows: {told}", added=names, holds=logits, detail=added)

    def change(self, model: nn.Module, site: Site, undo: ExitStack) -> None:
        """Register the norms and lay the layer that calls them over the projection's class."""
        module = module_at(model, site.path)
        if (why := class_stays(module)) is not None:
            raise RewriteError(f"AddQKNorm cannot change {site.path}", expected="the module as planned", found=why)
        weight = next(p for p in module.parameters(recurse=False) if p.is_floating_point())
        for each in site.detail:
            module.add_module(_NAMES[each.part], self._norm(each, weight).train(module.training))
        module.__dict__[NormedHeads.KEY] = tuple((_NAMES[each.part], each.rows) for each in site.detail)
        lay(module, NormedHeads, site.path)

    def _norm(self, added: Added, like: torch.Tensor) -> HeadNorm:
        heads = 1 if self.shared else len(added.rows)
        return HeadNorm(self.kind, heads, len(added.rows[0]), self.eps, dtype=like.dtype, device=like.device)

    def fit(self, model: nn.Module, sites: tuple[Site, ...], inputs: Inputs) -> None:
        """Set the gains, and train them where that was asked for."""
        if self.start == "unit":
            return
        norms = {(s.path, each.part): _norm_at(model, s.path, each) for s in sites for each in s.detail}
        rows = {(s.path, each.part): each.rows for s in sites for each in s.detail}
        for key, rms in head_rms(model, rows, inputs).items():
            norms[key].set_rms(rms)
        if self.start == "distilled":
            projections = [module_at(model, site.path) for site in sites]
            distil(model, projections, [norm.weight for norm in norms.values()], inputs, self.steps)

    def confirm(self, sites: tuple[Site, ...], anatomy: Anatomy) -> None:
        """Check that every attention site reads as having norms on queries and keys."""
        held = {site.path: site.qk_norm for site in anatomy.attention}
        for path in {each.attention for site in sites for each in site.detail}:
            found = held.get(path)
            if found is None or found.query is None or found.key is None:
                raise RewriteError(
                    f"AddQKNorm did not take hold at {path}", expected="norms on queries and keys", found=repr(found)
                )

    def told(self, model: nn.Module, sites: tuple[Site, ...], anatomy: Anatomy) -> tuple[str, ...]:
        """The bound on the logits of every attention site that the gains imply."""
        if any(p.is_meta for p in model.parameters()):
            return ()
        held = {attention.path: attention for attention in anatomy.attention}
        return tuple(in_words(held[path], bound) for path, bound in self.bounds(model, sites, anatomy).items())

    def bounds(self, model: nn.Module, sites: tuple[Site, ...], anatomy: Anatomy) -> dict[str, float | None]:
        """Largest |logit| before a soft cap that the gains allow at each attention site, by its path.

        None where the factor on q·k is not constant.
        """
        added: dict[str, dict[str, tuple[HeadNorm, tuple[int, ...]]]] = {}
        for site in sites:
            for each in site.detail:
                added.setdefault(each.attention, {})[each.part] = (_norm_at(model, site.path, each), each.heads)
        found: dict[str, float | None] = {}
        for attention in (each for each in anatomy.attention if each.path in added):
            (query, q_heads), (key, k_heads) = added[attention.path]["q"], added[attention.path]["k"]
            scale = attention.scale
            bound = None if scale is None else logit_bound(query, key, (q_heads, k_heads), scale)
            found[attention.path] = bound
        return found


def _norm_at(model: nn.Module, path: str, added: Added) -> HeadNorm:
    norm = module_at(model, full_name(path, _NAMES[added.part]))
    assert isinstance(norm, HeadNorm)
    return norm


def _features(columns: HeadRows) -> list[tuple[int, ...]]:
    """The output features of each head."""
    return [tuple(i for start, stop in spans for i in range(start, stop)) for spans in columns.heads]
