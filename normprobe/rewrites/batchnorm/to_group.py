"""Batch norms become group norms of single samples."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, ClassVar, final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from normprobe.errors import RewriteError
from normprobe.records import Anatomy, NormSite
from normprobe.rewrites.base import ChosenRewrite, Effect, Site, Sites, Survey, full_name, module_at
from normprobe.rewrites.batchnorm.held import Held, batch_norm_sites, held_of
from normprobe.rewrites.edits import bytes_in, set_values
from normprobe.rewrites.swap import Layer, lay

_MOST = 32  # groups; Wu & He 2018, sec. 3.1
_OWN = {"weight": "group_gain", "bias": "group_offset"}  # names where the batch norm has none


@final
class Grouped(Layer):
    """Group norm with the gain and offset of the batch norm below (Wu & He 2018, eq. 7).

    x: (B, C, …) -> the same shape and dtype.
    """

    NOTE = "group norm (normprobe)"
    normprobe_name = "GroupNorm"
    KEY: ClassVar[str] = "_group_norm"

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Each group of channels of each sample normed by its own mean and variance."""
        groups, eps, weight, bias = self.__dict__[Grouped.KEY]
        gain, offset = self.get_parameter(weight), self.get_parameter(bias)
        return F.group_norm(x, groups, gain.to(x.dtype), offset.to(x.dtype), eps)


@dataclass(frozen=True)
class _Detail:
    held: Held
    groups: int
    channels: int


@final
@dataclass(frozen=True)
class ToGroupNorm(ChosenRewrite):
    """Batch norms become group norms, which take the statistic of each sample alone, in train mode as in eval mode.

    Calibrated by the stored statistics: with mean m and variance v of each channel, a group has, in expectation, the
    mean of its m, and as variance σ² the mean of its v + m² less the square of that. Gain g and offset b become g σ /
    √(v + eps) and b + g (mean − m) / √(v + eps). The stored statistics go. Single samples are far from the statistics
    of all: outputs can move by as much as they are large, and the model has to be trained on.

    Attributes:
        groups: of channels; None for the largest number up to 32 that divides them into groups of two or more.
        only: a pattern of paths of norms, or several; None for all.
    """

    usual = Effect.CALIBRATED
    groups: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.groups is not None and self.groups < 1:
            raise RewriteError("ToGroupNorm cannot be made", expected="groups from 1", found=repr(self.groups))

    def describe(self) -> str:
        """What it does, in one line."""
        told = f"{self.groups} groups" if self.groups is not None else f"up to {_MOST} groups"
        return f"batch norms become group norms ({told}), gains and offsets carried over by the stored statistics"

    def sites(self, survey: Survey) -> Sites:
        """One site for every batch norm that stores its statistics."""

        def site(norm: NormSite) -> Site | str | None:
            held = held_of(survey, norm)
            if isinstance(held, str):
                return held
            channels = module_at(survey.model, norm.path).get_buffer(held.mean).numel()
            groups = _groups(channels) if self.groups is None else self.groups
            if channels % groups:
                return f"its {channels} channels do not make {groups} equal groups"
            return _site(survey, norm, _Detail(held, groups, channels))

        return batch_norm_sites(survey, self.only, site)

    def change(self, model: nn.Module, site: Site, undo: ExitStack) -> None:
        """Write gain and offset, drop the statistics, and lay the group norm over the class."""
        detail: _Detail = site.detail
        module = module_at(model, site.path)
        gain, offset = _carried(module, detail)
        buffer = module.get_buffer(detail.held.mean)
        names = []
        for kind, own, values in (("weight", detail.held.weight, gain), ("bias", detail.held.bias, offset)):
            if own is None:
                own = _OWN[kind]
                fresh = values.to(dtype=buffer.dtype, device=buffer.device)
                module.register_parameter(own, nn.Parameter(fresh))
            else:
                held = module.get_parameter(own)
                set_values(held, values.reshape(held.shape), undo)
            names.append(own)
        module._buffers.update(dict.fromkeys(module._buffers))
        module.__dict__[Grouped.KEY] = (detail.groups, detail.held.eps, *names)
        lay(module, Grouped, site.path)

    def confirm(self, sites: tuple[Site, ...], anatomy: Anatomy) -> None:
        """Check that every norm reads as one of single samples."""
        for site in sites:
            norm = anatomy.norm(site.path)
            if norm is None or norm.batch_dependent or norm.kind not in ("groupnorm", "instancenorm", "layernorm"):
                what = f"ToGroupNorm did not take hold at {site.path}"
                raise RewriteError(what, expected="groupnorm", found="no norm" if norm is None else norm.kind)


def _groups(channels: int) -> int:
    return max(
        groups for groups in range(1, _MOST + 1) if channels % groups == 0 and (channels > groups or groups == 1)
    )


def _site(survey: Survey, norm: NormSite, detail: _Detail) -> Site:
    held = detail.held
    touched = tuple(full_name(norm.path, own) for own in (held.weight, held.bias) if own is not None)
    own = {"weight": held.weight, "bias": held.bias}
    added = tuple(full_name(norm.path, _OWN[kind]) for kind, name in own.items() if name is None)
    change = f"becomes groupnorm, {detail.groups} groups of {detail.channels // detail.groups} channels"
    size = bytes_in(module_at(survey.model, norm.path))
    return Site(norm.path, change, touched, added, undo_bytes=size, detail=detail)


def _carried(module: nn.Module, detail: _Detail) -> tuple[Tensor, Tensor]:
    """Gain and offset under which a group norm gives what the batch norm did, in expectation: (C,) each, float64."""
    mean, variance = detail.held.statistics(module)
    gain, offset = detail.held.affine(module)
    parts = (detail.groups, -1)
    centre = mean.reshape(parts).mean(1, keepdim=True)
    spread = (variance + mean.square()).reshape(parts).mean(1, keepdim=True) - centre.square()
    size = (spread + detail.held.eps).sqrt().expand(parts[0], detail.channels // parts[0]).flatten()
    middle = centre.expand(parts[0], detail.channels // parts[0]).flatten()
    root = torch.sqrt(variance + detail.held.eps)
    return gain * size / root, offset + gain * (middle - mean) / root
