"""Train without norms: they go, and an initialisation by depth with a few scalars takes their place."""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Literal, final

import torch
from torch import Tensor, nn

from normprobe.anatomy.flow.ops import Role
from normprobe.capture.invoke import Inputs
from normprobe.errors import RewriteError
from normprobe.records import Anatomy
from normprobe.rewrites.at_boundary import AtInput
from normprobe.rewrites.base import Effect, Refusal, Rewrite, Site, Sites, Survey, full_name, module_at
from normprobe.rewrites.boundary import Boundaries
from normprobe.rewrites.edits import set_values
from normprobe.rewrites.initialise import Initialise
from normprobe.rewrites.initialise.computed import computed_weights
from normprobe.rewrites.residual.scale import SCALE, scale_output
from normprobe.rewrites.settings import check_seed
from normprobe.rewrites.stand_in import goes, take_out, why_not_out
from normprobe.rewrites.swap import lay
from normprobe.rewrites.swap import why_not as class_stays

Variant = Literal["fixup", "t_fixup"]
_OFFSET = "fixup_offset"
_BOUNDED = ("affine", "identity", "dyt")


@final
class Offset(AtInput):
    """Adds the number `fixup_offset` to the first tensor that the forward below is given."""

    NOTE, KEY = "its input plus a number (normprobe)", "_fixup_argument"

    def normprobe_act(self, stream: Tensor) -> Tensor:
        """The input, plus the number."""
        return stream + self.get_parameter(_OFFSET).to(stream.dtype)


@final
@dataclass(frozen=True)
class Fixup(Rewrite):
    """The norms of a residual network go, and its initialisation keeps updates small at every depth.

    Breaking: to be trained from scratch. "fixup" (Zhang, Dauphin & Ma 2019, sec. 3) makes the last weights of every
    branch and the head 0, scales the others of a branch of m weights by writes^(−1/(2m − 2)), puts a learned factor,
    1, on every branch and adds a learned number, 0, before every weight and every activation that is a module.
    "t_fixup" (Huang et al. 2020, sec. 3.2) is for transformers: Xavier's scale by depth, and no warm-up. A module that
    passes its input on stands where a norm was.

    Attributes:
        variant: fixup | t_fixup.
        seed: of the drawn values.
    """

    usual = Effect.BREAKING
    variant: Variant = "fixup"
    seed: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_seed(self)

    def describe(self) -> str:
        """What it does, in one line."""
        more = ", a factor on every branch and an offset before every weight" if self.variant == "fixup" else ""
        return f"norms go, weights are drawn by depth ({self.variant}){more}"

    @property
    def _drawing(self) -> Initialise:
        return Initialise(self.variant, seed=self.seed)

    def _drawn(self, survey: Survey) -> Sites:
        """The weights and their biases; parameters of norms that cannot go stay as they are."""
        norms = {name for norm in survey.anatomy.norms for name in (norm.weight, norm.bias)}
        found = self._drawing.sites(survey)
        return replace(found, sites=tuple(site for site in found.sites if site.touched[0] not in norms))

    def sites(self, survey: Survey) -> Sites:
        """The norms, the weights, and for "fixup" the branches, weights and activations that get a number."""
        if not survey.anatomy.streams:
            return Sites(refused=(Refusal(".", "no residual stream was found"),))
        closed = tuple(dict.fromkeys(computed_weights(survey, "writers")))
        if closed:  # without its norms a branch that starts as it is would not be bounded
            return Sites(refused=closed)
        found: list[Site | Refusal] = list(_norms(survey))
        drawn = self._drawn(survey)
        own = "{} is drawn anew by what follows it without the norms"
        found += [replace(w, change=own.format(w.touched[0]), detail=_keep) for w in drawn.sites]
        found += drawn.refused
        notes: tuple[str, ...] = ()
        if self.variant == "fixup":
            found += _factors(survey)
            offsets, missed = _offsets(survey)
            found += offsets
            if missed:
                notes = (f"{missed} activations are no modules of their own: no offset is added before them",)
        sites = {(*site.claims, site.change): site for site in found if isinstance(site, Site)}
        return Sites(tuple(sites.values()), tuple(each for each in found if isinstance(each, Refusal)), notes)

    def change(self, model: nn.Module, site: Site, undo: ExitStack) -> None:
        """Make the change that the site was planned with; weights are put aside for `fit`."""
        site.detail(model, site, undo)

    def fit(self, model: nn.Module, sites: tuple[Site, ...], inputs: Inputs) -> None:
        """Draw the weights by their place in the model as it is now.

        A weight that the plan did not have stays as it is, also where it runs now.
        """
        planned = {name for site in sites for name in site.touched}
        for site in self._drawn(Survey.of(model, inputs)).sites:
            if planned.issuperset(site.touched):
                with ExitStack() as undo:
                    self._drawing.change(model, site, undo)
                    undo.pop_all()  # `change` has put the old values on the plan's own

    def confirm(self, sites: tuple[Site, ...], anatomy: Anatomy) -> None:
        """Check that none of the norms is left."""
        for site in sites:
            norm = anatomy.norm(site.path)
            if site.detail is _take_out and norm is not None and norm.kind not in _BOUNDED:
                raise RewriteError(f"Fixup did not take hold at {site.path}", expected="no norm", found=norm.kind)


def _norms(survey: Survey) -> Iterator[Site | Refusal]:
    for norm in survey.anatomy.norms:
        if not norm.executed or norm.kind in _BOUNDED:
            continue
        why = why_not_out(survey, norm.path) if norm.module else "it is written out inside a forward and cannot go"
        if why is not None:
            yield Refusal(norm.path, why)
            continue
        gone, size = goes(survey.model, norm.path)
        yield Site(norm.path, f"the {norm.kind} goes", gone=gone, undo_bytes=size, detail=_take_out)


def _take_out(model: nn.Module, site: Site, undo: ExitStack) -> None:
    take_out(model, site.path)


def _keep(model: nn.Module, site: Site, undo: ExitStack) -> None:
    for name in site.touched:
        set_values(model.get_parameter(name), model.get_parameter(name), undo)


def _factors(survey: Survey) -> Iterator[Site | Refusal]:
    boundaries = Boundaries(survey)
    for stream in survey.anatomy.streams:
        for branch in stream.branches:
            writer = boundaries.write(branch)
            why = "no module returns what it adds" if writer is None else class_stays(module_at(survey.model, writer))
            if writer is None or why is not None:
                yield Refusal(branch.path, f"there is no place for a factor: {why}")
                continue
            added = (full_name(writer, SCALE),)
            yield Site(writer, "what it writes times a learned 1", added=added, detail=_factor)


def _factor(model: nn.Module, site: Site, undo: ExitStack) -> None:
    scale_output(module_at(model, site.path), site.path, _number(model, 1.0))


def _offsets(survey: Survey) -> tuple[list[Site | Refusal], int]:
    """A site for every module that weighs or bends a branch's signal, and how many functions bend it without one of
    their own: a module that runs at several places would have one number for all, on the trunk too where it runs there.
    """
    trace, flow = survey.trace, survey.flow
    inside = {w.parameter for w in survey.anatomy.weights if not {"reader", "inner", "writer"}.isdisjoint(w.roles)}
    runs = Counter(call.path for call in trace.calls if not call.composite)
    found: dict[str, Site | Refusal] = {}
    missed = 0
    for step in flow.steps:
        weighs = step.role is Role.MATMUL and not inside.isdisjoint(step.parameters)
        path, call = flow.path(step), trace.calls[step.call]
        leaf = call.spec is not None and not any(True for _ in module_at(survey.model, path or ".").children())
        bends = step.role is Role.ACT and leaf and runs[path] == 1
        if step.role is Role.ACT and not bends:
            missed += 1
        if bends or (leaf and weighs):
            why = class_stays(module_at(survey.model, path))
            added = (full_name(path, _OFFSET),)
            site = Site(path, "its input plus a learned 0", added=added, detail=_offset)
            found.setdefault(path, site if why is None else Refusal(path, why))
    return list(found.values()), missed


def _offset(model: nn.Module, site: Site, undo: ExitStack) -> None:
    module = module_at(model, site.path)
    module.register_parameter(_OFFSET, _number(model, 0.0))
    name = next(iter(inspect.signature(module.forward).parameters), "")
    module.__dict__[Offset.KEY] = (0, name)
    lay(module, Offset, site.path)


def _number(model: nn.Module, value: float) -> nn.Parameter:
    like = next(p for p in model.parameters() if p.is_floating_point())
    return nn.Parameter(torch.tensor(value, dtype=like.dtype, device=like.device))
