"""Carry a model into the maximal update parametrisation."""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from typing import final

import torch
from torch import nn

from normprobe.errors import RewriteError
from normprobe.records import Anatomy, AttentionSite, Declared
from normprobe.rewrites.base import Effect, Refusal, Rewrite, Site, Sites, Survey, module_at
from normprobe.rewrites.initialise import Initialise
from normprobe.rewrites.initialise.rewrite import Written, written_site
from normprobe.rewrites.mup.layers import Base, DividedInput, divide_input, scale_queries
from normprobe.rewrites.mup.place import Place
from normprobe.rewrites.mup.read import head_weight, places, width_of
from normprobe.rewrites.qk.fitness import projection, why_not
from normprobe.rewrites.residual.scale import scale_output
from normprobe.rewrites.settings import check_seed
from normprobe.rewrites.swap import has_layer
from normprobe.rewrites.swap import why_not as class_stays

_NEAR = 4e-3  # of a ratio of two constants that were read: one may be held in bfloat16


@dataclass(frozen=True)
class _Readout:
    factor: float
    argument: str
    wanted: float  # the multiplier of the logits, afterwards


@dataclass(frozen=True)
class _Queries:
    attention: str
    parameter: str
    axis: int
    factor: float
    features: tuple[int, ...]  # of the projection's output that are queries
    wanted: float  # the scale of the attention, afterwards


@dataclass(frozen=True)
class _Entry:
    stream: str
    factor: float
    wanted: float  # the multiplier between the stream's source and its first read, afterwards


@final
@dataclass(frozen=True)
class MuP(Rewrite):
    """Draws and multiplies as muP asks for, so that a learning rate tuned at one width serves another.

    Breaking: to be trained from scratch, with the rates of `normprobe.parameter_groups`. At the base width this is
    `Initialise("lecun")`. At another width weights inside the network keep std 1 / √fan-in, tables and the readout
    that of the base, and what the readout reads is multiplied by base width / width, its weight tied or not (Yang et
    al. 2022, Tensor Programs V, table 8); what chooses among experts is a readout without multiplier, of std ∝
    1 / fan-in (table 3). A multiplier √width on an embedding becomes that of the base. Where heads grow, queries get
    the factor that makes the scale of their attention ∝ 1 / features of a head (definition 4.1), and at the base what
    it was. Biases become 0, gains of norms 1.

    Every size inside the branches is taken to have grown with the width. What is refused as a weight of unknown place
    stays as it is. Refused as a whole where the readout cannot be multiplied, and where heads grow and a scale of
    attention is not 1 / √features.

    Attributes:
        base_width: features that the readout reads in the model that the learning rate is tuned on.
        base_head_dim: features of a head of attention there; None: as many as here, heads grow in number.
        seed: of the values.
    """

    usual = Effect.BREAKING
    base_width: int = 256
    base_head_dim: int | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        for field, value in (("base_width", self.base_width), ("base_head_dim", self.base_head_dim)):
            if value is not None and value < 1:
                raise RewriteError("MuP cannot be made", expected=f"{field}: a number of features", found=repr(value))
        check_seed(self)

    def describe(self) -> str:
        """What it does, in one line."""
        heads = "" if self.base_head_dim is None else f" with heads of {self.base_head_dim}"
        return f"carries a base of width {self.base_width}{heads} to this width by muP (Yang et al. 2022, table 8)"

    @property
    def _drawing(self) -> Initialise:
        return Initialise("lecun", seed=self.seed)

    def sites(self, survey: Survey) -> Sites:
        """The readout, the queries where heads grow, and every parameter that is written."""
        head = head_weight(survey.anatomy)
        whole = [
            *self._readout(survey),
            *self._attention(survey),
            *_entries(survey, width_of(head) / self.base_width if head else 1.0),
        ]
        refused = tuple(each for each in whole if isinstance(each, Refusal))
        if refused:
            return Sites(refused=refused)
        drawn, left = self._drawn(survey)
        kept = [each for each in whole if isinstance(each, Site)]
        return Sites((*kept, *drawn), left, tuple(self._notes(survey.anatomy)))

    def _readout(self, survey: Survey) -> Iterator[Site | Refusal]:
        anatomy = survey.anatomy
        head, site = anatomy.head, head_weight(anatomy)
        if head is None or site is None:
            yield Refusal(".", "no readout was found, which muP multiplies: pass the model with its head")
            return
        path = head.path.rpartition(".")[0] or "."
        why = _closed(survey, path) or ("its logits are multiplied by no constant" if not head.logit_multiplier else "")
        if why:
            yield Refusal(path, why)
            return
        assert head.logit_multiplier
        ratio, has = width_of(site) / self.base_width, head.logit_multiplier
        own = has != 1 and abs(has * math.sqrt(width_of(site)) - 1) < _NEAR  # 1 / √width, and so another at the base
        factor = 1 / math.sqrt(ratio) if own else 1 / ratio
        argument = next(iter(inspect.signature(module_at(survey.model, path).forward).parameters), "")
        yield Site(path, f"what it reads times {factor:.4g}", detail=_Readout(factor, argument, has * factor))

    def _attention(self, survey: Survey) -> Iterator[Site | Refusal]:
        for site in survey.anatomy.attention:
            base = self.base_head_dim or site.head_dim
            wanted = math.sqrt(base) / site.head_dim
            if base == site.head_dim or (site.scale is not None and abs(site.scale / wanted - 1) < _NEAR):
                continue
            found = _queries(survey, site, math.sqrt(base / site.head_dim), wanted)
            yield Refusal(site.path, found) if isinstance(found, str) else found

    def _drawn(self, survey: Survey) -> tuple[list[Site], tuple[Refusal, ...]]:
        found = self._drawing.sites(survey)
        known = self.places(survey)
        drawn, left = [], list(found.refused)
        for site in found.sites:
            (name,), detail = site.touched, site.detail
            place = known[name]
            if detail.weight is None:
                drawn.append(site)
            elif place.role == "unknown":
                left.append(Refusal(name, f"{place.why}; it stays as it is"))
            else:
                table = detail.weight.kind == "embedding"
                drawn.append(written_site(survey, name, detail.times(_std(place, table))))
        return drawn, tuple(left)

    def _notes(self, anatomy: Anatomy) -> Iterator[str]:
        sizes = sorted({site.head_dim for site in anatomy.attention})
        if sizes and self.base_head_dim is None:
            told = ", ".join(map(str, sizes))
            yield f"heads of {told} features are taken to be as large at the base: attention keeps its scale"

    def places(self, survey: Survey) -> dict[str, Place]:
        """The place of every parameter of a model that has a readout, by name."""
        site = head_weight(survey.anatomy)
        assert site is not None
        head_dim = max((each.head_dim for each in survey.anatomy.attention), default=1)
        return places(survey, width_of(site) / self.base_width, head_dim / (self.base_head_dim or head_dim))

    def change(self, model: nn.Module, site: Site, undo: ExitStack) -> None:
        """Lay a multiplier over a module, or write fresh values in place."""
        module, detail = module_at(model, site.path), site.detail
        if isinstance(detail, _Readout):
            base = Base(self.base_width, self.base_head_dim, self.seed)
            divide_input(module, site.path, detail.factor, base, detail.argument)
        elif isinstance(detail, _Queries):
            weight = model.get_parameter(detail.parameter)
            factors = torch.ones(weight.shape[detail.axis], dtype=weight.dtype, device=weight.device)
            factors[list(detail.features)] = detail.factor
            scale_queries(module, site.path, factors)
        elif isinstance(detail, _Entry):
            scale_output(module, site.path, detail.factor)
        else:
            self._drawing.change(model, site, undo)

    def confirm(self, sites: tuple[Site, ...], anatomy: Anatomy) -> None:
        """Check the multiplier of the logits and the scales of attention that the changed model reads as having."""
        logits = anatomy.head.logit_multiplier if anatomy.head else None
        scales = {site.path: site.scale for site in anatomy.attention}
        starts = {stream.name: stream.input_multiplier for stream in anatomy.streams}
        for site in sites:
            detail = site.detail
            if isinstance(detail, _Readout):
                _check(site, "logits times", logits, detail.wanted)
            elif isinstance(detail, _Queries):
                _check(site, f"attention of {detail.attention} scaled by", scales.get(detail.attention), detail.wanted)
            elif isinstance(detail, _Entry):
                _check(site, f"the start of {detail.stream} times", starts.get(detail.stream), detail.wanted)
        self._drawing.confirm(tuple(site for site in sites if isinstance(site.detail, Written)), anatomy)


def _check(site: Site, what: str, found: float | None, wanted: float) -> None:
    if not found or abs(found / wanted - 1) > _NEAR:
        expected = f"{what} {wanted:.4g}"
        raise RewriteError(f"MuP did not take hold at {site.path}", expected=expected, found=repr(found))


def _std(place: Place, table: bool) -> float:
    """What the std of LeCun's scheme at this width is multiplied by.

    That scheme gives tables 1 / √width and readouts 1 / √fan-in, where muP wants what the base has, or with no
    multiplier a readout ∝ 1 / fan-in.
    """
    if table or place.multiplied:
        return math.sqrt(max(place.ratio, place.fan_out))
    return 1 / math.sqrt(place.ratio) if place.role == "readout" else 1.0


def _closed(survey: Survey, path: str) -> str | None:
    """Why the readout at `path` cannot be multiplied; None where it can."""
    trace = survey.trace
    runs = [call for call in trace.calls if call.path == path and not call.composite]
    reads = runs[0].inputs[:1] if len(runs) == 1 else ()
    if path == "." or not all(trace.values[value].dtype.is_floating_point for value in reads) or not reads:
        return "no module reads the stream and gives the logits, once in a forward: there is no place for a multiplier"
    module = module_at(survey.model, path)
    if has_layer(module, DividedInput):
        return "MuP has multiplied it already"
    taken = class_stays(module)
    return None if taken is None else f"{path} cannot be changed: {taken}"


def _queries(survey: Survey, site: AttentionSite, factor: float, wanted: float) -> Site | str:
    """The site that scales the queries of an attention, or why there is none."""
    if site.qk_norm is not None:
        return "its queries and keys are normed: the factor on queries would have to come behind the norm"
    why = _scale(site) or why_not(survey, site)
    if why is not None:
        return why
    query = site.columns["q"]
    features = sorted({row for head in query.heads for start, stop in head for row in range(start, stop)})
    detail = _Queries(site.path, query.parameter, query.axis, factor, tuple(features), wanted)
    return Site(projection(query), f"queries times {factor:.4g}", detail=detail)


def _scale(site: AttentionSite) -> str | None:
    """Why the scale of an attention cannot be told at the base; None where it is 1 / √features."""
    if site.scale is not None and abs(site.scale * math.sqrt(site.head_dim) - 1) < _NEAR:
        return None
    told = "no constant" if site.scale is None else f"{site.scale:.4g}"
    return f"its scale is {told}, not 1/√{site.head_dim}: what it is at the base is not known"


def _entries(survey: Survey, ratio: float) -> Iterator[Site | Refusal]:
    """The tables of streams whose start is multiplied by √width, which the base multiplies by its own."""
    for stream in survey.anatomy.streams:
        times = stream.input_multiplier
        if ratio == 1 or not (stream.width and times) or abs(times / math.sqrt(stream.width) - 1) > _NEAR:
            continue
        path = (stream.source or "").rpartition(".")[0]
        runs = [call for call in survey.trace.calls if call.path == path and not call.composite]
        if len(runs) != 1 or len(runs[0].outputs) != 1 or class_stays(module_at(survey.model, path)) is not None:
            yield Refusal(stream.name, "it begins with its source times √width, and no module gives the source alone")
            continue
        factor = 1 / math.sqrt(ratio)
        detail = _Entry(stream.name, factor, times * factor)
        yield Site(path, f"what it gives times {factor:.4g}, since it is multiplied by √width", detail=detail)


def carried(model: nn.Module) -> MuP | None:
    """The rewrite that a model carries; None where MuP has not rewritten it."""
    for module in model.modules():
        if has_layer(module, DividedInput):
            base: Base = module.__dict__[DividedInput.HELD][1]
            return MuP(base.width, base.head_dim, base.seed)
    return None


def declared_by_mup(model: nn.Module, anatomy: Anatomy, declared: tuple[Declared, ...]) -> tuple[Declared, ...]:
    """`declared`, and what the rewrite that a model carries says of the scale of attention, where heads have one size.

    It stands beside the statement of the innermost configuration around a site, so that it governs what that does.
    """
    held, sizes = carried(model), {site.head_dim for site in anatomy.attention}
    if held is None or held.base_head_dim is None or len(sizes) != 1:
        return declared
    base, value = held.base_head_dim, math.sqrt(held.base_head_dim) / sizes.pop()
    around = [
        [one.path for one in declared if f"{site.path}.".startswith("" if one.path == "." else f"{one.path}.")]
        for site in anatomy.attention
    ]
    paths = dict.fromkeys(max(each, key=lambda path: (path != ".", len(path)), default=".") for each in around)
    told = {"field": "MuP.base_head_dim", "fact": "attention_scale", "stated": base, "value": value}
    return (*declared, *(Declared.model_validate({"path": path, **told}) for path in paths))
