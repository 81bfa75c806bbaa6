"""Add the norm that a pre-norm stream lacks between its last write and the head."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass
from typing import Literal, final

from torch import Tensor, nn

from normprobe.errors import RewriteError
from normprobe.records import Anatomy, Stream
from normprobe.rewrites.at_boundary import AtInput, AtOutput, lay_at
from normprobe.rewrites.base import Effect, Refusal, Rewrite, Site, Sites, Survey, full_name, module_at
from normprobe.rewrites.boundary import Boundaries, Boundary
from normprobe.rewrites.norms.made import Made, build, wanted
from normprobe.rewrites.swap import why_not

FINAL_NORM = "final_norm"


@final
class NormedInput(AtInput):
    """Norms one argument before the forward below sees it."""

    NOTE = "norms its input (normprobe)"
    KEY = "_final_norm_argument"

    def normprobe_act(self, stream: Tensor) -> Tensor:
        """The stream, normed."""
        normed: Tensor = self.get_submodule(FINAL_NORM)(stream)
        return normed


@final
class NormedOutput(AtOutput):
    """Norms the first tensor that the forward below returns."""

    NOTE = "norms its output (normprobe)"

    def normprobe_act(self, stream: Tensor) -> Tensor:
        """The stream, normed."""
        normed: Tensor = self.get_submodule(FINAL_NORM)(stream)
        return normed


@dataclass(frozen=True)
class _Detail:
    stream: str
    boundary: Boundary
    made: Made


@final
@dataclass(frozen=True)
class AddFinalNorm(Rewrite):
    """A final norm for every pre-norm stream that needs one and has none (Xiong et al. 2020, table 1).

    Breaking on a trained model: the head reads another scale than it has learned, unless the norm was lost in a
    conversion, and then its gains have to be loaded. The new norm has the width and eps of the stream's own norms and
    unit gain. It becomes a child `final_norm` of the module that reads the stream on its way to the head, and acts on
    that module's input; where no module does, of the module that returns the stream, and acts on its output.

    Attributes:
        kind: "same" as the norm of the stream's last branch, "layernorm" or "rmsnorm".
        eps: eps inside the root; None takes that of the stream's own norm.
    """

    usual = Effect.BREAKING
    kind: Literal["same", "layernorm", "rmsnorm"] = "same"
    eps: float | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.eps is not None and not 0 < self.eps < 1:
            raise RewriteError("AddFinalNorm cannot be made", expected="0 < eps < 1", found=repr(self.eps))

    def describe(self) -> str:
        """What it does, in one line."""
        kind = "norm of the stream's own kind" if self.kind == "same" else self.kind
        return f"adds a final {kind} with unit gain where a pre-norm stream reaches the head without one"

    def sites(self, survey: Survey) -> Sites:
        """One site for every stream that needs a final norm, has none, and passes a module boundary."""
        sites, refused = [], []
        boundaries = Boundaries(survey)
        for stream in survey.anatomy.streams:
            if stream.final_norm is not None or stream.needs_final_norm is False:
                continue
            found = self._site(survey, boundaries, stream)
            if isinstance(found, Site):
                sites.append(found)
            else:
                refused.append(Refusal(stream.name, found))
        return Sites(tuple(sites), tuple(refused))

    def _site(self, survey: Survey, boundaries: Boundaries, stream: Stream) -> Site | str:
        """The site for one stream, or why it has none."""
        if stream.needs_final_norm is None:
            return stream.final_norm_reason or "it could not be decided whether the head reads it"
        made = wanted(survey, stream, self.kind, self.eps)
        if isinstance(made, str):
            return made
        boundary = boundaries.find(stream)
        if boundary is None:
            return (
                "no module boundary between its last write and the head: it is written and read in the forward of "
                f"{stream.branches[-1].path}, or by modules that run several times"
            )
        module = module_at(survey.model, boundary.path)
        taken = why_not(module) or (f"it has a child {FINAL_NORM} already" if hasattr(module, FINAL_NORM) else None)
        if taken is not None:
            return f"its boundary {boundary.path} cannot be changed: {taken}"
        return _site(stream, _Detail(stream.name, boundary, made))

    def change(self, model: nn.Module, site: Site, undo: ExitStack) -> None:
        """Register the norm and lay the layer that calls it over the boundary's class."""
        detail: _Detail = site.detail
        module = module_at(model, site.path)
        why = why_not(module) or (f"it has a child {FINAL_NORM} already" if hasattr(module, FINAL_NORM) else None)
        if why is not None:
            raise RewriteError(
                f"AddFinalNorm cannot change {site.path}", expected="the module as it was planned", found=why
            )
        norm = build(model, detail.made).train(module.training)
        module.add_module(FINAL_NORM, norm)
        lay_at(detail.boundary, (NormedInput, NormedOutput), module)

    def confirm(self, sites: tuple[Site, ...], anatomy: Anatomy) -> None:
        """Check that every stream of a site reads as having this final norm."""
        finals = {stream.name: stream.final_norm for stream in anatomy.streams}
        for site in sites:
            wanted, found = full_name(site.path, FINAL_NORM), finals.get(site.detail.stream)
            if found != wanted:
                raise RewriteError(
                    f"AddFinalNorm did not take hold on the stream {site.detail.stream}",
                    expected=f"final norm {wanted}",
                    found=f"final norm {found}",
                )


def _site(stream: Stream, detail: _Detail) -> Site:
    boundary = detail.boundary
    where = f"on its {'input' if boundary.side == 'input' else 'output'}"
    change = f"{detail.made} {where}"
    if boundary.side == "output" and stream.raw_readers:
        change += f"; {', '.join(stream.raw_readers)} will get it normed too"
    names = [name for name, _ in build(None, detail.made).named_parameters()]
    added = tuple(full_name(boundary.path, f"{FINAL_NORM}.{name}") for name in names)
    return Site(boundary.path, change, added=added, detail=detail)
