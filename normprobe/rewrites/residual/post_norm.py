"""Move the norms of a pre-norm stream behind the sums, to train it as a post-norm stack or with DeepNorm."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from typing import final

from torch import nn

from normprobe.errors import RewriteError
from normprobe.records import Anatomy, Branch, NormSite, Stream
from normprobe.rewrites.at_add import Link, link
from normprobe.rewrites.base import Effect, Refusal, Rewrite, Site, Sites, Survey, full_name, module_at
from normprobe.rewrites.boundary import Boundaries
from normprobe.rewrites.deepnorm import scales
from normprobe.rewrites.stand_in import goes, take_out, why_not_out
from normprobe.rewrites.swap import why_not as class_stays


@dataclass(frozen=True)
class _Detail:
    norm: str
    stream: int
    alpha: float = 1.0
    writer: str = ""
    adder: str = ""
    child: str = ""  # name of the norm in the module that adds; empty for the final norm, which goes


@final
@dataclass(frozen=True)
class ToPostNorm(Rewrite):
    """x + F(norm(x)) becomes norm(x + F(x)), or norm(α x + F(x)), in every block; the final norm goes.

    Breaking: to be trained from scratch. A post-norm stack has the gradient of its top layers large and needs warm-up
    (Xiong et al. 2020, theorem 1); DeepNorm's α with the initial scale β of `Initialise("deepnorm")` holds the first
    updates (Wang et al. 2022, sec. 4.2). Each norm keeps its object and its parameters, and becomes a child of the
    module that adds, `post_` before its old name; a module that passes its input on stands where it was.

    Attributes:
        deepnorm: whether the trunk is multiplied by DeepNorm's α before each sum.
    """

    usual = Effect.BREAKING
    deepnorm: bool = False

    def describe(self) -> str:
        """What it does, in one line."""
        sum_of = "α x + F(x), α as DeepNorm has it" if self.deepnorm else "x + F(x)"
        return f"norms of pre-norm branches move onto the sum: norm({sum_of}); the final norm goes"

    def sites(self, survey: Survey) -> Sites:
        """The norms of every stream of which all branches are pre-norm and can be moved."""
        sites: list[Site] = []
        refused = []
        boundaries = Boundaries(survey)
        for index, stream in enumerate(survey.anatomy.streams):
            found = list(self._stream(survey, boundaries, index, stream))
            why = next((each for each in found if isinstance(each, str)), None)
            if why is not None:
                refused.append(Refusal(stream.name, why))
            else:
                sites += [each for each in found if isinstance(each, Site)]
        return Sites(tuple(sites), tuple(refused))

    def _stream(self, survey: Survey, boundaries: Boundaries, index: int, stream: Stream) -> Iterator[Site | str]:
        alpha = scales(survey.anatomy)[index].alpha if self.deepnorm else 1.0
        for branch in stream.branches:
            norm = survey.anatomy.norm(branch.pre_norm or "")
            writer = boundaries.write(branch)
            why = _unfit(stream, branch, norm, writer) or (norm and why_not_out(survey, norm.path))
            why = why or (norm and writer and _other_shape(survey, norm, writer))
            if why is not None or norm is None or writer is None:
                yield f"{branch.path}: {why}"
                return
            stays = (class_stays(module_at(survey.model, path)) for path in (writer, branch.add.path))
            yield next((f"{branch.path}: {why}" for why in stays if why), None) or _moved(
                survey.model, index, branch, norm, writer, alpha
            )
        final = survey.anatomy.norm(stream.final_norm or "")
        if final is not None and not final.module:
            yield f"its final norm {final.path} is written out inside a forward and cannot go"
        elif final is not None:
            gone, size = goes(survey.model, final.path)
            change = "the final norm goes: the last sum is normed"
            yield Site(final.path, change, gone=gone, undo_bytes=size, detail=_Detail(final.path, index))

    def change(self, model: nn.Module, site: Site, undo: ExitStack) -> None:
        """Put an identity in the place of the norm, and link its old module to the add."""
        detail: _Detail = site.detail
        norm = take_out(model, detail.norm)
        if not detail.child:
            return
        adder, writer = module_at(model, detail.adder), module_at(model, detail.writer)
        if hasattr(adder, detail.child):
            found = f"it has a child {detail.child} already"
            raise RewriteError(
                f"ToPostNorm cannot change {detail.adder}", expected="the module as planned", found=found
            )
        adder.add_module(detail.child, norm)
        made = Link(detail.alpha, detail.child)
        link(writer, adder, made, (detail.writer, detail.adder))

    def confirm(self, sites: tuple[Site, ...], anatomy: Anatomy) -> None:
        """Check that every branch of the streams reads as post-norm, or as DeepNorm's."""
        wanted = "deepnorm" if self.deepnorm else "post"
        for index in {site.detail.stream for site in sites}:
            branches = anatomy.streams[index].branches if index < len(anatomy.streams) else ()
            found = {branch.placement for branch in branches}
            if found != {wanted}:
                told = ", ".join(sorted(found)) or "no branch"
                raise RewriteError("ToPostNorm did not take hold", expected=f"all branches {wanted}", found=told)


def _unfit(stream: Stream, branch: Branch, norm: NormSite | None, writer: str | None) -> str | None:
    if stream.topology != "ordinary" or branch.skip != "identity" or branch.skip_scale != 1.0:
        return "its skip is no plain identity"
    if branch.placement != "pre" or norm is None:
        return f"its norm is placed {branch.placement}, not before it alone"
    if branch.parallel:
        return "it shares its trunk with a parallel branch: there is one sum for both"
    if not norm.module or norm.executions != 1:
        return f"{norm.path} is no module of its own that runs once"
    if any(other is not branch and other.pre_norm == norm.path for other in stream.branches):
        return f"{norm.path} stands before other branches too"
    return "no module returns what is added, and nothing but the add" if writer is None else None


def _other_shape(survey: Survey, norm: NormSite, writer: str) -> str | None:
    """Why a norm cannot take the sum, where what it is given now has another shape: the stream beside a second one."""
    values, calls = survey.trace.values, [call for call in survey.trace.calls if not call.composite]
    given = next(values[call.inputs[0]].shape for call in calls if call.path == norm.path)
    summed = next(values[call.outputs[0]].shape for call in calls if call.path == writer)
    alike = given[-1:] == summed[-1:] if norm.axes == (-1,) else given == summed
    return None if alike else f"{norm.path} norms another shape than the sum's {summed}: {given}"


def _moved(model: nn.Module, index: int, branch: Branch, norm: NormSite, writer: str, alpha: float) -> Site:
    adder = branch.add.path
    child = "post_" + norm.path.rpartition(".")[2]
    times = "" if alpha == 1.0 else f"{alpha:.4g} times the trunk and "
    change = f"moves onto the sum of {times}what {writer} writes, as {full_name(adder, child)}"
    names = [name for name, _ in module_at(model, norm.path).named_parameters()]
    return Site(
        norm.path,
        change,
        added=tuple(full_name(full_name(adder, child), name) for name in names),
        gone=tuple(full_name(norm.path, name) for name in names),
        detail=_Detail(norm.path, index, alpha, writer, adder, child),
    )
