"""Scale what branches add, or the trunk that they are added to."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from typing import ClassVar, Literal, final

import torch
from torch import Tensor, nn

from normprobe.errors import RewriteError
from normprobe.records import Anatomy, Branch, Stream
from normprobe.rewrites.at_add import Link, link
from normprobe.rewrites.at_boundary import AtOutput
from normprobe.rewrites.base import ChosenRewrite, Effect, Refusal, Site, Sites, Survey, full_name, module_at
from normprobe.rewrites.boundary import Boundaries
from normprobe.rewrites.choosing import branch_names
from normprobe.rewrites.deepnorm import depth, scales
from normprobe.rewrites.edits import bytes_of, chosen, set_values
from normprobe.rewrites.residual.absorb import absorbing, taken_up
from normprobe.rewrites.swap import has_layer, lay
from normprobe.rewrites.swap import why_not as class_stays

Kind = Literal["constant", "layerscale", "rezero", "skipinit", "deepnorm"]
SCALE = "branch_scale"
_READ = {"constant": "constant", "layerscale": "channel", "rezero": "scalar", "skipinit": "scalar"}


@final
class ScaledOutput(AtOutput):
    """Multiplies the first tensor that the forward below returns by a constant, or by the parameter `branch_scale`."""

    NOTE = "its output is scaled (normprobe)"
    KEY: ClassVar[str] = "_branch_scale"

    def normprobe_act(self, stream: Tensor) -> Tensor:
        """The write, scaled, in its own dtype."""
        constant: float | None = self.__dict__[ScaledOutput.KEY]
        return stream * (self.get_parameter(SCALE).to(stream.dtype) if constant is None else constant)


@dataclass(frozen=True)
class _Detail:
    place: tuple[int, int]  # the stream and the branch, by their order
    branch: Branch
    value: float
    writer: str  # the module whose output is the write
    width: int
    absorbed: tuple[str, ...]  # parameters that are divided by the value


@final
@dataclass(frozen=True)
class ScaleResidual(ChosenRewrite):
    """A factor on every branch before it is added, or with "deepnorm" on the trunk that it is added to.

    Exact where the factor goes into the weights that write, which are divided by it: the model computes what it did,
    and trains as one with the factor does. Breaking where the factor is 0, where `preserve` is False, and on the trunk.

    Attributes:
        kind: "constant" 1 / √(writes) (Radford et al. 2019, sec. 2.3); "layerscale" a gain for each channel (Touvron
            et al. 2021, sec. 2: 0.1 up to 18 blocks, 1e-5 up to 24, 1e-6 beyond); "rezero" one learned number, 0
            (Bachlechner et al. 2021, eq. 1); "skipinit" the same beside norms left out (De & Smith 2020, sec. 4);
            "deepnorm" α on the trunk of a post-norm stream (Wang et al. 2022, fig. 2), to be trained from scratch with
            `Initialise("deepnorm")`.
        value: the factor; None for the kind's own.
        preserve: whether the weights that write are divided by the factor.
        only: a pattern of paths of branches, or several; None for all.
    """

    kind: Kind = "layerscale"
    value: float | None = None
    preserve: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.value is not None and not abs(self.value) < 1e6:
            raise RewriteError("ScaleResidual cannot be made", expected="a finite value", found=repr(self.value))

    @property
    def effect(self) -> Effect:
        """Exact where the weights that write take the factor up, else breaking."""
        starts_at_0 = self.value == 0 or (self.value is None and self.kind in ("rezero", "skipinit"))
        return Effect.EXACT if self.preserve and self.kind != "deepnorm" and not starts_at_0 else Effect.BREAKING

    def describe(self) -> str:
        """What it does, in one line."""
        if self.kind == "deepnorm":
            return "multiplies the trunk of post-norm streams by DeepNorm's α before each sum"
        told = ", the weights that write divided by it" if self.effect is Effect.EXACT else ""
        return f"puts a factor on every branch before it is added ({self.kind}){told}"

    def places(self, survey: Survey) -> Iterator[tuple[str, ...]]:
        """The branches."""
        return (branch_names(branch) for stream in survey.anatomy.streams for branch in stream.branches)

    def sites(self, survey: Survey) -> Sites:
        """One site for every branch."""
        found = list(self._all(survey, Boundaries(survey)))
        return Sites.of(found)

    def _all(self, survey: Survey, boundaries: Boundaries) -> Iterator[Site | Refusal]:
        writers, trunks = absorbing(survey.anatomy), scales(survey.anatomy)
        for i, stream in enumerate(survey.anatomy.streams):
            value = trunks[i].alpha if self.kind == "deepnorm" and self.value is None else self._value(stream)
            for j, branch in enumerate(stream.branches):
                if not chosen(branch_names(branch), self.only):
                    continue
                found = self._branch(survey, boundaries, (i, j), branch, value, writers)
                yield Refusal(branch.path, found) if isinstance(found, str) else found

    def _branch(
        self,
        survey: Survey,
        boundaries: Boundaries,
        place: tuple[int, int],
        branch: Branch,
        value: float,
        writers: Mapping[str, str | None],
    ) -> Site | str:
        found = self._why_not(branch) or self._place(survey, boundaries, branch)
        if isinstance(found, str):
            return found
        absorbed = self._absorbed(boundaries, branch, found[0], writers) if self.effect is Effect.EXACT else ()
        if isinstance(absorbed, str):
            return absorbed
        return self._site(survey, _Detail(place, branch, value, *found, absorbed))

    def _value(self, stream: Stream) -> float:
        if self.value is not None:
            return self.value
        if self.kind == "constant":
            return float(stream.depth**-0.5)
        if self.kind != "layerscale":
            return 0.0
        blocks = depth(stream)
        return 0.1 if blocks <= 18 else 1e-5 if blocks <= 24 else 1e-6

    def _why_not(self, branch: Branch) -> str | None:
        if branch.branch_scale.kind != "none":
            return f"it has a {branch.branch_scale.kind} scale already"
        if branch.output_norm is not None:
            return f"it ends in the norm {branch.output_norm}, whose gain scales each channel already"
        if self.kind == "deepnorm" and branch.placement != "post":
            return f"its norm is placed {branch.placement}; DeepNorm's α belongs before a norm on the sum"
        if self.kind == "deepnorm" and branch.skip_scale is None:
            return f"its trunk passes a {branch.skip}: no factor on it could be told apart from that"
        return None if branch.feature_axis == -1 else "its features are not the last axis"

    def _place(self, survey: Survey, boundaries: Boundaries, branch: Branch) -> tuple[str, int] | str:
        """The module that writes, and how many features; or why there is none."""
        writer = boundaries.write(branch)
        if writer is None:
            return "no module returns what is added, and nothing but the add: there is no place for a factor"
        stays = (class_stays(module_at(survey.model, path)) for path in (writer, branch.add.path))
        why = next((why for why in stays if why is not None), None)
        if why is not None or has_layer(module_at(survey.model, writer), ScaledOutput):
            return f"{writer} cannot be changed: {why or 'it is scaled already'}"
        width = _width(survey, branch)
        return "how many features it writes could not be told" if width is None else (writer, width)

    def _site(self, survey: Survey, detail: _Detail) -> Site:
        on_trunk = self.kind == "deepnorm"
        added = (full_name(detail.writer, SCALE),) if self.kind in ("layerscale", "rezero", "skipinit") else ()
        told = "the trunk" if on_trunk else f"what {detail.writer} writes"
        path = detail.branch.add.path if on_trunk else detail.writer
        held = bytes_of(survey.model, detail.absorbed)
        return Site(path, f"{told} times {detail.value:.4g}", detail.absorbed, added, undo_bytes=held, detail=detail)

    def _absorbed(
        self, boundaries: Boundaries, branch: Branch, writer: str, absorbable: Mapping[str, str | None]
    ) -> tuple[str, ...] | str:
        whys = {name: absorbable.get(name, "it is no weight that could be followed") for name in branch.writers}
        taken = taken_up(boundaries, branch, writer)
        both = "it reads what another writer gives, and something else"
        whys |= {name: both for name, whole in taken.behind.items() if not whole}
        why = next((f"{name}: {why}" for name, why in whys.items() if why is not None), None)
        return why or taken.why_not or tuple(name for name in branch.writers if name not in taken.behind)

    def change(self, model: nn.Module, site: Site, undo: ExitStack) -> None:
        """Divide the writers, and lay the factor over the module that writes, or over the one that adds."""
        detail: _Detail = site.detail
        writer = module_at(model, detail.writer)
        for name in detail.absorbed:
            parameter = model.get_parameter(name)
            set_values(parameter, parameter.detach().to(torch.float64) / detail.value, undo)
        if self.kind == "deepnorm":
            adder = module_at(model, detail.branch.add.path)
            link(writer, adder, Link(alpha=detail.value), (detail.writer, detail.branch.add.path))
            return
        factor = detail.value if self.kind == "constant" else _parameter(model, detail, self.kind)
        scale_output(writer, detail.writer, factor)

    def confirm(self, sites: tuple[Site, ...], anatomy: Anatomy) -> None:
        """Check that every branch reads as having this factor."""
        for site in sites:
            i, j = site.detail.place
            branches = anatomy.streams[i].branches if i < len(anatomy.streams) else ()
            branch = branches[j] if j < len(branches) else None
            if branch is None or not self._holds(branch, site.detail.value):
                told = "no branch" if branch is None else f"{branch.branch_scale}, trunk times {branch.skip_scale}"
                expected = f"{self.kind} {site.detail.value:.4g}"
                raise RewriteError(f"ScaleResidual did not take hold at {site.path}", expected=expected, found=told)

    def _holds(self, branch: Branch, value: float) -> bool:
        if self.kind == "deepnorm":
            return branch.skip_scale is not None and abs(branch.skip_scale / value - 1) < 1e-3
        return branch.branch_scale.kind == _READ[self.kind] or (value == 1 and self.kind == "constant")


def scale_output(writer: nn.Module, path: str, factor: float | nn.Parameter) -> None:
    """Multiply what the module at `path` returns by a constant, or by a parameter that it gets as `branch_scale`."""
    writer.__dict__[ScaledOutput.KEY] = None if isinstance(factor, nn.Parameter) else factor
    if isinstance(factor, nn.Parameter):
        writer.register_parameter(SCALE, factor)
    lay(writer, ScaledOutput, path)


def _parameter(model: nn.Module, detail: _Detail, kind: Kind) -> nn.Parameter:
    like = next(model.get_parameter(name) for name in (*detail.branch.writers, *detail.branch.parameters))
    shape = (detail.width,) if kind == "layerscale" else ()
    return nn.Parameter(torch.full(shape, detail.value, dtype=like.dtype, device=like.device))


def _width(survey: Survey, branch: Branch) -> int | None:
    for site in survey.anatomy.weights:
        if site.parameter in branch.writers:
            return site.shape[site.output_axis]
    return None
