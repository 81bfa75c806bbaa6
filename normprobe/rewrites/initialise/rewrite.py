"""Draw the weights of a model anew, each by its place in the data flow."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import final

import torch
from torch import nn

from normprobe.capture.writes import writable
from normprobe.errors import RewriteError
from normprobe.measures.recipes import Drawn
from normprobe.records import Anatomy, WeightSite
from normprobe.rewrites.base import ChosenRewrite, Effect, Refusal, Site, Sites, Survey
from normprobe.rewrites.biases import find_biases
from normprobe.rewrites.edits import bytes_of, set_values
from normprobe.rewrites.initialise.choice import ROLES, meant
from normprobe.rewrites.initialise.computed import computed_weights
from normprobe.rewrites.initialise.draw import Drawing, fresh
from normprobe.rewrites.initialise.norms import norm_values
from normprobe.rewrites.initialise.padding import padding_rows
from normprobe.rewrites.initialise.schemes import Scheme, Weight, scheme
from normprobe.rewrites.initialise.stacks import Part, betas, parts, t_fixup_factors, unknown_readers
from normprobe.rewrites.settings import check_seed

_FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


@dataclass(frozen=True)
class Written:
    """What is written: a drawn weight, or one value into a parameter beside it."""

    weight: WeightSite | None = None
    drawings: tuple[Drawing, ...] = ()
    value: float = 0.0
    kept: tuple[int, ...] = ()  # rows of a table that stay as they are

    def __str__(self) -> str:
        if self.weight is None:
            return f"{self.value:g}"
        told = "; ".join(dict.fromkeys(str(each.draw) for each in self.drawings))
        return told + (f", rows {', '.join(map(str, self.kept))} stay" if self.kept else "")

    def times(self, factor: float) -> Written:
        """The same with weights `factor` times as large."""
        scaled = (replace(d, draw=replace(d.draw, std=factor * d.draw.std)) for d in self.drawings)
        return replace(self, drawings=tuple(scaled))


@final
@dataclass(frozen=True)
class Initialise(ChosenRewrite):
    """Draws weights anew by one scheme; writers are known by data flow, three-dimensional weights of experts included.

    Breaking: what a model has learned is lost. Biases of the drawn weights become 0, and where `only` is None or names
    "norms", gains of norms 1 (stored 0 where the norm adds the 1) and their offsets 0. A tied weight is drawn once, as
    a table. The row of a table that the lookup names as padding stays as it is. Equal seeds give equal values, on
    every device and whatever else is drawn.

    Attributes:
        scheme: gpt2 | xavier | kaiming | lecun | orthogonal | deepnorm | small | fixup | t_fixup | zero_writers;
            `SCHEMES` has the formula and the source of each, `describe()` those of this one.
        only: which weights: a role (readers | writers | inner | embeddings | head | norms | others), a pattern of
            parameter names such as "h.*.mlp.*", or several of these; None for all.
        seed: of the values.
    """

    usual = Effect.BREAKING
    scheme: str = "gpt2"
    seed: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        scheme(self.scheme)
        check_seed(self)

    def describe(self) -> str:
        """What it does, in one line."""
        found = scheme(self.scheme)
        return f"draws weights anew, {found.name}: {found.about} ({found.source})"

    def places(self, survey: Survey) -> Iterator[tuple[str, ...]]:
        """The weights, and the gains and offsets of norms, each also by the words for its roles."""
        for site in survey.anatomy.weights:
            yield (site.parameter, *(word for word, role in ROLES.items() if role in site.roles))
        names = (name for norm in survey.anatomy.norms for name in (norm.weight, norm.bias))
        yield from ((name, "norms") for name in names if name is not None)

    def sites(self, survey: Survey) -> Sites:
        """One site for every parameter that is written."""
        found: list[Site | Refusal | None] = []
        named = dict(survey.model.named_parameters())
        biases, places = find_biases(survey, named), _Places.of(survey.anatomy)
        for weight in survey.anatomy.weights:
            if not meant(weight.parameter, weight.roles, self.only):
                continue
            site = self._weight(survey, weight, places) if weight.parameter in named else _gone(weight)
            found.append(site)
            if isinstance(site, Site):
                found += [_value(survey, bias.parameter, 0.0) for bias in biases.get(weight.parameter, ())]
        if self.scheme != "zero_writers":
            values = norm_values(survey.anatomy, named).items()
            found += [_value(survey, name, value) for name, value in values if meant(name, ("norm",), self.only)]
        found += dict.fromkeys(computed_weights(survey, self.only))
        sites = {site.touched[0]: site for site in found if isinstance(site, Site)}
        return Sites(tuple(sites.values()), tuple(each for each in found if isinstance(each, Refusal)))

    def _weight(self, survey: Survey, site: WeightSite, places: _Places) -> Site | Refusal | None:
        known, parameter = scheme(self.scheme), survey.model.get_parameter(site.parameter)
        if parameter.dtype not in _FLOATS:
            return Refusal(site.parameter, f"it is stored as {str(parameter.dtype)[6:]}, not as plain numbers")
        drawings = tuple(_drawings(known, survey.anatomy, site, places))
        if not drawings:
            return None
        if known.parted and site.parameter in places.unknown:
            return Refusal(site.parameter, "which of its rows make queries and keys could not be told")
        detail = Written(site, drawings, kept=padding_rows(survey.trace, site))
        return written_site(survey, site.parameter, detail)

    def change(self, model: nn.Module, site: Site, undo: ExitStack) -> None:
        """Write the fresh values in place."""
        detail: Written = site.detail
        parameter = model.get_parameter(site.touched[0])
        if parameter.is_meta:
            raise RewriteError(f"cannot draw {site.touched[0]}", expected="a model with weights", found="device meta")
        if detail.weight is None:
            set_values(parameter, torch.full(parameter.shape, detail.value), undo)
            return
        kept = {row: parameter.detach()[row].clone() for row in detail.kept}
        set_values(parameter, fresh(detail.weight, detail.drawings, self.seed), undo)
        with writable(parameter):
            for row, values in kept.items():
                parameter[row].copy_(values)

    def confirm(self, sites: tuple[Site, ...], anatomy: Anatomy) -> None:
        """Check that every drawn weight is still one of the model's weights, in the same roles."""
        roles = {weight.parameter: weight.roles for weight in anatomy.weights}
        for site in sites:
            weight = site.detail.weight
            if weight is not None and roles.get(weight.parameter) != weight.roles:
                raise RewriteError(
                    f"Initialise changed what {weight.parameter} is read as",
                    expected=", ".join(weight.roles),
                    found=", ".join(roles.get(weight.parameter, ("no weight",))),
                )


@dataclass(frozen=True)
class _Places:
    """What the Anatomy says of weights beyond their own record."""

    parts: Mapping[str, tuple[Part, ...]]
    unknown: frozenset[str]
    betas: Mapping[str, float]
    t_fixup: Mapping[str, float]

    @classmethod
    def of(cls, anatomy: Anatomy) -> _Places:
        known = parts(anatomy)
        return cls(known, unknown_readers(anatomy, known), betas(anatomy), t_fixup_factors(anatomy))


def _drawings(known: Scheme, anatomy: Anatomy, site: WeightSite, places: _Places) -> Iterator[Drawing]:
    """One for each part of the weight, with the fan-out of that part; one for the whole where it has none."""
    beta = places.betas.get(site.parameter)
    for part in places.parts.get(site.parameter, (Part(None, ()),)):
        fan_out = len(part.rows) or site.fan_out
        drawn = Drawn.of(site, anatomy, (site.fan_in, fan_out), "normal")
        factor = places.t_fixup.get(site.parameter)
        draw = known.draw(Weight(drawn, site.followed_by, part.name, beta, factor))
        if draw is not None:
            yield Drawing(draw, part.rows or None)


def _gone(weight: WeightSite) -> Refusal:
    return Refusal(weight.parameter, "the model has no parameter of this name: it is computed from others")


def _value(survey: Survey, name: str, value: float) -> Site:
    return written_site(survey, name, Written(value=value))


def written_site(survey: Survey, name: str, detail: Written) -> Site:
    """The site at which the parameter `name` is written."""
    path, _, own = name.rpartition(".")
    held = bytes_of(survey.model, (name,))
    return Site(path or ".", f"{own}: {detail}", (name,), forward=False, undo_bytes=held, detail=detail)
