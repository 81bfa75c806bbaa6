"""Add norms on what branches write, before it is added to the stream."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Literal, final

import torch
from torch import Tensor, nn

from normprobe.capture.guard import untouched
from normprobe.capture.invoke import Inputs, invoke
from normprobe.errors import RewriteError
from normprobe.records import Anatomy, Branch, Stream
from normprobe.rewrites.at_boundary import AtOutput
from normprobe.rewrites.base import ChosenRewrite, Effect, Refusal, Site, Sites, Survey, full_name, module_at
from normprobe.rewrites.boundary import Boundaries
from normprobe.rewrites.choosing import branch_names
from normprobe.rewrites.edits import chosen
from normprobe.rewrites.norms.made import Made, build, wanted
from normprobe.rewrites.swap import lay
from normprobe.rewrites.swap import why_not as class_stays

Start = Literal["unit", "calibrated"]
OUTPUT_NORM = "output_norm"


@final
class NormedWrite(AtOutput):
    """Norms the first tensor that the forward below returns, by the child `output_norm`."""

    NOTE = "its write is normed (normprobe)"

    def normprobe_act(self, stream: Tensor) -> Tensor:
        """The write, normed."""
        normed: Tensor = self.get_submodule(OUTPUT_NORM)(stream)
        return normed


@dataclass(frozen=True)
class _Detail:
    place: tuple[int, int]  # the stream and the branch, by their order
    made: Made


@final
@dataclass(frozen=True)
class AddOutputNorms(ChosenRewrite):
    """A norm on the output of every branch that has none: x + F(norm(x)) becomes x + norm(F(norm(x))).

    What is written has one size for every token then, whatever the weights do (sandwich norm: Ding et al. 2021,
    CogView, sec. 2.4; Gemma Team 2024, Gemma 2, sec. 2). Breaking: the sizes that tokens had among each other are lost.
    The norm has the width and eps of the stream's own norms and becomes a child `output_norm` of the module whose
    output is added.

    Attributes:
        kind: "same" as the norms of the stream, "layernorm" or "rmsnorm".
        start: of the gains: "unit" 1; "calibrated" the RMS that the branch has on the given inputs, so that the stream
            keeps its size.
        eps: inside the root; None for that of the stream's own norm.
        only: a pattern of paths of branches, or several; None for all.
    """

    usual = Effect.BREAKING
    kind: Literal["same", "layernorm", "rmsnorm"] = "same"
    start: Start = "unit"
    eps: float | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.eps is not None and not 0 < self.eps < 1:
            raise RewriteError("AddOutputNorms cannot be made", expected="0 < eps < 1", found=repr(self.eps))

    def describe(self) -> str:
        """What it does, in one line."""
        return f"norms what branches write before it is added, gains {self.start}"

    def places(self, survey: Survey) -> Iterator[tuple[str, ...]]:
        """The branches."""
        return (branch_names(branch) for stream in survey.anatomy.streams for branch in stream.branches)

    def sites(self, survey: Survey) -> Sites:
        """One site for every branch without a norm behind its weights."""
        sites, refused = [], []
        boundaries = Boundaries(survey)
        for i, stream in enumerate(survey.anatomy.streams):
            made = wanted(survey, stream, self.kind, self.eps)
            for j, branch in enumerate(stream.branches):
                if branch.output_norm is not None or not chosen(branch_names(branch), self.only):
                    continue
                detail = made if isinstance(made, str) else _Detail((i, j), made)
                found = detail if isinstance(detail, str) else _site(survey, boundaries, stream, branch, detail)
                if isinstance(found, Site):
                    sites.append(found)
                else:
                    refused.append(Refusal(branch.path, found))
        return Sites(tuple(sites), tuple(refused))

    def change(self, model: nn.Module, site: Site, undo: ExitStack) -> None:
        """Register the norm and lay the layer that calls it over the module that writes."""
        module = module_at(model, site.path)
        norm = build(model, site.detail.made).train(module.training)
        module.add_module(OUTPUT_NORM, norm)
        lay(module, NormedWrite, site.path)

    def weightless(self, sites: tuple[Site, ...]) -> bool:
        """Not where something is measured."""
        return self.start == "unit" and super().weightless(sites)

    def fit(self, model: nn.Module, sites: tuple[Site, ...], inputs: Inputs) -> None:
        """Set calibrated gains to the RMS of what comes to each norm."""
        if self.start == "unit":
            return
        norms = {site.path: module_at(model, full_name(site.path, OUTPUT_NORM)) for site in sites}
        for path, rms in _rms(model, norms, inputs).items():
            gain = getattr(norms[path], "weight", None)
            if gain is not None:
                with torch.no_grad():
                    gain.fill_(rms)

    def confirm(self, sites: tuple[Site, ...], anatomy: Anatomy) -> None:
        """Check that every branch reads as ending in its norm."""
        for site in sites:
            i, j = site.detail.place
            promised = full_name(site.path, OUTPUT_NORM)
            branches = anatomy.streams[i].branches if i < len(anatomy.streams) else ()
            found = branches[j].output_norm if j < len(branches) else None
            if found != promised:
                what = f"AddOutputNorms did not take hold at {site.path}"
                raise RewriteError(what, expected=promised, found=str(found))


def _site(survey: Survey, boundaries: Boundaries, stream: Stream, branch: Branch, detail: _Detail) -> Site | str:
    if branch.feature_axis != -1:
        return "its features are not the last axis"
    writer = boundaries.write(branch)
    if writer is None:
        return "no module returns what is added, and nothing but the add: there is no place for a norm"
    module = module_at(survey.model, writer)
    taken = class_stays(module) or (f"it has a child {OUTPUT_NORM} already" if hasattr(module, OUTPUT_NORM) else None)
    if taken is not None:
        return f"{writer} cannot be changed: {taken}"
    names = [name for name, _ in build(None, detail.made).named_parameters()]
    added = tuple(full_name(writer, f"{OUTPUT_NORM}.{name}") for name in names)
    return Site(writer, f"{detail.made} on what it writes to {stream.name}", added=added, detail=detail)


def _rms(model: nn.Module, norms: dict[str, nn.Module], inputs: Inputs) -> dict[str, float]:
    """RMS over all elements of what each norm is given; the norms pass it through, so that the model runs as before."""
    found: dict[str, float] = {}

    def look(path: str, given: Tensor) -> Tensor:
        wide = given.detach().to(torch.promote_types(given.dtype, torch.float32))
        found[path] = float(wide.square().mean().sqrt())
        return given

    with ExitStack() as hooks, untouched(model) as keeper, torch.no_grad():
        for path, norm in norms.items():
            handle = norm.register_forward_hook(lambda m, args, out, path=path: look(path, args[0]))
            hooks.callback(handle.remove)
        with keeper.mode():
            invoke(model, inputs)
    return found
