"""How the stream enters without a mean: by tables whose rows have none, or by a subtraction at every forward."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, Literal

from torch import nn

from normprobe.anatomy.flow.ops import Role
from normprobe.anatomy.flow.steps import Flow, Step
from normprobe.records import Stream, WeightSite
from normprobe.rewrites.base import Site, Survey, module_at
from normprobe.rewrites.boundary import Boundaries
from normprobe.rewrites.edits import bytes_of
from normprobe.rewrites.swap import why_not

Tied = Literal["entry", "untie"]


@dataclass(frozen=True)
class Centred:
    """A parameter from which the mean over `axis` is taken."""

    axis: int


@dataclass(frozen=True)
class Untied:
    """The head's parameter `name` of the module becomes a copy of the table that it shared."""

    name: str


def entry_sites(survey: Survey, boundaries: Boundaries, stream: Stream, tied: Tied) -> list[Site] | str:
    """What has to change where the stream begins, or why that cannot be.

    Tables that the stream is the sum of are centred in place, unless the head reads one: then the mean is taken from
    the stream itself, or with `untie` the head gets a copy of its own first. A stream that begins with anything else (a
    norm, patches, a projection) has its mean taken at every forward.
    """
    tables = _tables(survey, boundaries, stream)
    shared = [table for table in tables if set(table.roles) != {"embedding"}]
    if tables and not shared:
        return [_centred(survey, table) for table in tables]
    if tables and tied == "untie":
        untied = _untie(survey, shared)
        return untied if isinstance(untied, str) else [untied, *(_centred(survey, table) for table in tables)]
    boundary = boundaries.entry(stream)
    if boundary is None:
        return "no module boundary where it begins: its mean cannot be taken from it there"
    why = why_not(module_at(survey.model, boundary.path))
    if why is not None:
        return f"{boundary.path}, where it begins, cannot be changed: {why}"
    return [Site(boundary.path, "the stream enters without its mean", detail=boundary)]


def _tables(survey: Survey, boundaries: Boundaries, stream: Stream) -> tuple[WeightSite, ...]:
    """The tables whose rows the stream begins as the sum of; none where it begins with anything else."""
    value = boundaries.start(stream)
    names = None if value is None else _looked_up(boundaries.flow, value)
    if not names:
        return ()
    sites = {site.parameter: site for site in survey.anatomy.weights}
    found = [sites.get(name) for name in names]
    whole = [s for s in found if s is not None and s.kind == "embedding" and s.shape[-1] == stream.width]
    return tuple(whole) if len(whole) == len(found) else ()


def _looked_up(flow: Flow, value: int) -> tuple[str, ...] | None:
    """Parameters that `value` is a sum of, by moves, constant factors and sums alone; None where it is more."""
    names: dict[str, None] = {}
    todo, seen = [value], {value}
    while todo:
        step = flow.made_by(todo.pop())
        if step is None or not _adds_up(flow, step):
            return None
        names |= dict.fromkeys(step.parameters)
        fresh = [v for v in step.inputs if v not in seen and step.role is not Role.SOURCE]
        seen.update(fresh)
        todo += fresh
    return tuple(names)


def _adds_up(flow: Flow, step: Step) -> bool:
    """Whether a step moves, scales or sums rows of parameters; a number or a buffer that is added has a mean of its
    own."""
    if step.role is Role.SOURCE:
        return bool(step.parameters)
    if step.role is Role.SHIFT:
        return bool(step.statics) and all(flow.levels.parameters(v) for v in step.statics)
    return step.role in (Role.MOVE, Role.ADD) or (step.role is Role.SCALE and not step.parameters)


def _centred(survey: Survey, table: WeightSite) -> Site:
    return centred_site(survey, table.parameter, len(table.shape) - 1)


def centred_site(survey: Survey, name: str, axis: int) -> Site:
    """The site of a parameter from which the mean over `axis` is taken."""
    path, _, own = name.rpartition(".")
    held = bytes_of(survey.model, (name,))
    change = f"{own} without its mean over the features"
    return Site(path or ".", change, (name,), forward=False, undo_bytes=held, detail=Centred(axis))


def _untie(survey: Survey, shared: list[WeightSite]) -> Site | str:
    head, (table, *more) = survey.anatomy.head, shared
    if head is None or more or head.tied_to is None or head.path == head.tied_to:
        return f"{table.parameter} is read elsewhere too, not by a head with a parameter of its own"
    path, _, own = head.path.rpartition(".")
    flag = " and config.tie_word_embeddings becomes false" if _tying(survey.model) else ""
    change = f"{own} becomes a copy of {table.parameter}{flag}"
    return Site(path or ".", change, added=(head.path,), forward=False, detail=Untied(own))


def _tying(model: nn.Module) -> list[Any]:
    """The configurations of the model that say that its embeddings are tied."""
    config = getattr(model, "config", None)
    text = getattr(config, "get_text_config", lambda: config)()
    return list({id(c): c for c in (config, text) if getattr(c, "tie_word_embeddings", False)}.values())


def untie(model: nn.Module, module: nn.Module, name: str, undo: ExitStack) -> None:
    """Give the head a parameter of its own, equal to the shared one."""
    shared = module.get_parameter(name)
    setattr(module, name, nn.Parameter(shared.detach().clone(), requires_grad=shared.requires_grad))
    for config in _tying(model):
        undo.callback(setattr, config, "tie_word_embeddings", True)
        config.tie_word_embeddings = False
