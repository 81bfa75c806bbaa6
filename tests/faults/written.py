"""Norms written by hand, with the faults that such norms have, in the place of one that an Anatomy describes."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor, nn

from normprobe.records import Anatomy, NormSite
from tests.faults.edits import parameter
from tests.faults.edits import replace as put
from tests.faults.fault import NotHereError, Site

FEATURES = ("layernorm", "rmsnorm")


@dataclass(frozen=True)
class Form:
    """How a norm along the last axis is computed.

    Attributes:
        centred: subtracts the mean.
        eps: the constant.
        place: √(v + eps), √v + eps, or max(√v, eps).
        wide: takes its statistic in float32, else in the dtype of its input.
        one_plus: applies 1 + w.
        late: rounds to the input's dtype before it multiplies by the gain.
    """

    centred: bool
    eps: float
    place: Literal["inside", "outside", "clamp"] = "inside"
    wide: bool = True
    one_plus: bool = False
    late: bool = False


class Written(nn.Module):
    """A norm of this form with a gain and an offset of its own, or of the norm that it replaces."""

    def __init__(self, form: Form, weight: Tensor | None, bias: Tensor | None) -> None:
        super().__init__()
        self.form = form
        self.weight, self.bias = _held(weight), _held(bias)

    def forward(self, x: Tensor, *more: Tensor) -> Tensor:
        if more or (self.weight is not None and self.weight.numel() not in (1, x.shape[-1])):
            raise NotHereError("the norm is given more than what it norms, or its gain is of several of them")
        form = self.form
        wide = x.float() if form.wide else x
        centred = wide - wide.mean(-1, keepdim=True) if form.centred else wide
        y = centred / _root(centred.pow(2).mean(-1, keepdim=True), form)
        y = y.to(x.dtype) if form.late else y
        if self.weight is not None:
            gain = self.weight if form.late else self.weight.to(y.dtype)
            y = y * (1 + gain if form.one_plus else gain)
        return (y if self.bias is None else y + self.bias).to(x.dtype)


def _held(value: Tensor | None) -> nn.Parameter | None:
    return value if value is None or isinstance(value, nn.Parameter) else nn.Parameter(value)


def _root(square: Tensor, form: Form) -> Tensor:
    if form.place == "inside":
        return (square + form.eps).sqrt()
    return square.sqrt() + form.eps if form.place == "outside" else square.sqrt().clamp(min=form.eps)


def form_of(norm: NormSite) -> Form:
    """The form that a norm has, written with its statistic in float32."""
    if norm.kind not in FEATURES or norm.axes != (-1,) or norm.eps is None:
        raise NotHereError(f"{norm.path} is no norm along the last axis with a known eps")
    place: Literal["inside", "outside", "clamp"] = "inside"
    if norm.eps_placement in ("outside_sqrt", "clamp"):
        place = "outside" if norm.eps_placement == "outside_sqrt" else "clamp"
    return Form(norm.subtracts_mean is True, norm.eps, place, one_plus=norm.affine.startswith("one_plus"))


def written(model: nn.Module, norm: NormSite, **changes: object) -> Written:
    """The norm written by hand with these changes of its form, on its own gain and offset; not put anywhere yet."""
    form = replace(form_of(norm), **changes)  # type: ignore[arg-type]
    gain = None if norm.weight is None else parameter(model, norm.weight)
    return Written(form, gain, None if norm.bias is None else parameter(model, norm.bias))


def rewrite(model: nn.Module, anatomy: Anatomy, site: Site, **changes: object) -> Written:
    """Put `written` in the place of the norm at the site."""
    norm = anatomy.norm(site.path)
    if norm is None:
        raise NotHereError(f"no norm at {site.path}")
    made = written(model, norm, **changes)
    put(model, site.path, made)
    return made


def fresh(model: nn.Module, width: int, norm: NormSite) -> Written:
    """A norm like `norm`, over `width` features, with unit gain and no offset, where the model's parameters live."""
    like = next(model.parameters())
    gain = torch.ones(width, dtype=like.dtype, device=like.device)
    return Written(replace(form_of(norm), one_plus=False), gain, None)


def along_features(anatomy: Anatomy, *roles: str) -> list[Site]:
    """The norms that are modules, run, reduce the last axis, and have one of these roles (all, where none is given)."""
    return [
        Site(norm.path)
        for norm in anatomy.norms
        if norm.module and norm.executed and norm.kind in FEATURES and norm.axes == (-1,) and norm.eps is not None
        if norm.path != "." and norm.eps_placement in ("inside_sqrt", "outside_sqrt", "clamp")
        if not roles or norm.role in roles
    ]


def width_of(model: nn.Module, norm: NormSite) -> int:
    """How many features a norm along the last axis has."""
    if norm.size is None:
        raise NotHereError(f"the width of {norm.path} is not known")
    return norm.size
