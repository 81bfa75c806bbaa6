"""Batch norms go into the weights before them."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass
from typing import final

import torch
from torch import nn

from normprobe.anatomy.flow.ops import Role
from normprobe.errors import RewriteError
from normprobe.records import Anatomy, NormSite, WeightSite
from normprobe.rewrites.base import ChosenRewrite, Effect, Site, Sites, Survey, full_name, module_at
from normprobe.rewrites.batchnorm.held import Held, batch_norm_sites, held_of
from normprobe.rewrites.edits import bytes_of, set_values
from normprobe.rewrites.stand_in import goes, take_out

_IN_TRAIN_MODE = "in train mode the function changes: there is no batch statistic any more"


@dataclass(frozen=True)
class _Detail:
    held: Held
    weight: WeightSite
    bias: str | None  # own name of an offset that is there; None where one has to be added


@final
@dataclass(frozen=True)
class FoldBatchNorm(ChosenRewrite):
    """Each batch norm goes into the convolution or matrix whose output it reads: W g / √(v + eps), (c − m) g / √(v +
    eps) + b.

    Exact in eval mode; for inference and export (Jacob et al. 2018, sec. 3.2). A module that passes its input on stands
    where the norm was, and a weight without an offset gets one, which learns as the weight does. Refused where
    something else reads that output too, or the weight makes other outputs as well.

    Attributes:
        only: a pattern of paths of norms, or several; None for all.
    """

    usual = Effect.EXACT

    def describe(self) -> str:
        """What it does, in one line."""
        return "batch norms go into the weights before them"

    def sites(self, survey: Survey) -> Sites:
        """One site for every batch norm that reads one weight's output alone."""
        before = _Before(survey)
        found = batch_norm_sites(survey, self.only, before.site)
        return Sites(found.sites, found.refused, (_IN_TRAIN_MODE,) if found.sites else ())

    def change(self, model: nn.Module, site: Site, undo: ExitStack) -> None:
        """Scale weight and offset, and put an identity where the norm was."""
        detail: _Detail = site.detail
        norm = module_at(model, site.path)
        mean, variance = detail.held.statistics(norm)
        gain, offset = detail.held.affine(norm)
        factor = gain / torch.sqrt(variance + detail.held.eps)
        weight = model.get_parameter(detail.weight.parameter)
        path = detail.weight.parameter.rpartition(".")[0]
        holder = module_at(model, path or ".")
        had = torch.zeros_like(mean) if detail.bias is None else holder.get_parameter(detail.bias).detach().double()
        shape = [1] * weight.dim()
        shape[detail.weight.output_axis] = -1
        set_values(weight, weight.detach().double() * factor.reshape(shape), undo)
        fresh = (had - mean) * factor + offset
        if detail.bias is not None:
            set_values(holder.get_parameter(detail.bias), fresh, undo)
        else:
            made = fresh.to(dtype=weight.dtype, device=weight.device)
            holder._parameters["bias"] = nn.Parameter(made, weight.requires_grad)
        take_out(model, site.path)

    def confirm(self, sites: tuple[Site, ...], anatomy: Anatomy) -> None:
        """Check that none of the norms is left."""
        for site in sites:
            norm = anatomy.norm(site.path)
            if norm is not None and norm.kind != "identity":
                what = f"FoldBatchNorm did not take hold at {site.path}"
                raise RewriteError(what, expected="no norm", found=norm.kind)


class _Before:
    """The weights whose output a norm reads."""

    def __init__(self, survey: Survey) -> None:
        self.survey, self.trace = survey, survey.trace
        self.flow = survey.flow
        self.weights = {site.parameter: site for site in survey.anatomy.weights}

    def site(self, norm: NormSite) -> Site | str | None:
        """The site of one batch norm, or why it stays."""
        held = held_of(self.survey, norm)
        if isinstance(held, str):
            return held
        found = self._weight(norm)
        if isinstance(found, str):
            return found
        path = found.parameter.rpartition(".")[0] or "."
        holder, channels = module_at(self.survey.model, path), self._channels(norm, held)
        if found.shape[found.output_axis] != channels:
            return f"{found.parameter} numbers {found.shape[found.output_axis]} outputs, the norm {channels}"
        why = _no_place(holder, channels)
        if why is not None:
            return f"{path} has {why}"
        bias = None if holder._parameters["bias"] is None else "bias"
        touched = (found.parameter, *(() if bias is None else (full_name(path, bias),)))
        added = (full_name(path, "bias"),) if bias is None else ()
        gone, size = goes(self.survey.model, norm.path)
        size += bytes_of(self.survey.model, touched)
        detail = _Detail(held, found, bias)
        change = f"goes into {found.parameter}"
        return Site(norm.path, change, touched, added, gone=gone, undo_bytes=size, detail=detail)

    def _weight(self, norm: NormSite) -> WeightSite | str:
        calls = [call for call in self.trace.calls if call.path == norm.path and not call.composite]
        if len(calls) != 1 or not calls[0].inputs:
            return f"it runs {len(calls)} times"
        value = calls[0].inputs[0]
        step = self.flow.made_by(value)
        if step is None or step.role is not Role.MATMUL:
            return "what it reads does not come straight from a convolution or a matrix"
        if len(self.flow.readers(value)) != 1 or value in self.flow.outputs:
            return "something else reads what it reads"
        names = [name for name in step.parameters if name in self.weights]
        if len(names) != 1:
            return "the weight before it could not be told"
        users = [other for other in self.flow.steps if names[0] in other.parameters]
        if len(users) != 1 or names[0] not in dict(self.survey.model.named_parameters()):
            return f"{names[0]} makes other outputs as well, or is computed from others"
        return self.weights[names[0]]

    def _channels(self, norm: NormSite, held: Held) -> int:
        return module_at(self.survey.model, norm.path).get_buffer(held.mean).numel()


def _no_place(holder: nn.Module, channels: int) -> str | None:
    """Why a module can take no offset, or none more; None where it can."""
    if "bias" not in holder._parameters:
        return "no place for an offset"
    own = holder._parameters["bias"]
    return None if own is None or own.shape == (channels,) else "an offset of another shape"
