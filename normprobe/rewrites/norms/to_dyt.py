"""Norms become Dynamic Tanh, which bounds each element and takes no statistic."""

from __future__ import annotations

import math
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal, final

import torch
from torch import Tensor, nn

from normprobe.capture.guard import untouched
from normprobe.capture.invoke import Inputs, invoke
from normprobe.capture.writes import writable
from normprobe.errors import RewriteError
from normprobe.records import Anatomy, NormSite
from normprobe.rewrites.base import ChosenRewrite, Effect, Refusal, Site, Sites, Survey, full_name, module_at
from normprobe.rewrites.edits import bytes_of, chosen, set_values
from normprobe.rewrites.norms.computed import Form, acting, form_of, written
from normprobe.rewrites.norms.dyt_fit import Nearest, nearest
from normprobe.rewrites.norms.shared import why_shared
from normprobe.rewrites.swap import Layer, has_layer, lay

_ALPHA, _GAIN, _OFFSET = "alpha", "dyt_gain", "dyt_offset"
_START = 0.5  # Zhu et al. 2025, sec. 4
_ELEMENTS, _ROWS = 2**16, 64  # of one norm to which its tanh is fitted, and at least so many rows
_ROLES = frozenset({"pre", "post", "output", "final", "embedding"})


@final
class DynamicTanh(Layer):
    """gain · tanh(alpha · x) + offset with the gain and offset of the norm below (Zhu et al. 2025, eq. 2).

    x: (…, d) -> (…, d) in the input's dtype, computed in float32 or wider.
    """

    NOTE = "dynamic tanh (normprobe)"
    normprobe_name = "DynamicTanh"
    KEY: ClassVar[str] = "_dyt_form"

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """As the class says."""
        form: Form = self.__dict__[DynamicTanh.KEY]
        wide = torch.promote_types(x.dtype, torch.float32)
        y = torch.tanh(x.to(wide) * self.get_parameter(_ALPHA).to(wide))
        assert form.weight is not None
        gain = self.get_parameter(form.weight).to(wide)
        y = y * (1 + gain if form.one_plus else gain)
        if form.bias is not None:
            y = y + self.get_parameter(form.bias).to(wide)
        return y.to(x.dtype)


@final
@dataclass(frozen=True)
class ToDyT(ChosenRewrite):
    """LayerNorms and RMSNorms of residual streams become gain · tanh(alpha · x) + offset.

    Breaking: a trained norm's curve looks like a tanh for all tokens together, not for each (Zhu et al. 2025, sec. 3),
    so that the model has to be trained on. The module keeps its gain and offset and gets a parameter `alpha`, and
    `dyt_gain` and `dyt_offset` where it had no gain, or subtracted a mean and had no offset. Norms of queries and keys
    stay.

    Attributes:
        start: "calibrated" takes alpha, a factor on the gain and a shift of the offset from the tanh that is nearest to
            what each norm gives on the given inputs, by least squares; alpha is the largest, up to 1 / RMS of the
            inputs, that leaves at most 1 % more of the outputs unexplained, so that the tanh bends where a straight
            line would do as well. "unit" sets alpha to 0.5 and leaves gain and offset
            (ibid., sec. 4).
        only: a pattern of paths of norms, or several; None for all.
    """

    usual = Effect.BREAKING
    start: Literal["calibrated", "unit"] = "calibrated"

    def describe(self) -> str:
        """What it does, in one line."""
        alpha = "alpha from measured curves" if self.start == "calibrated" else f"alpha {_START}"
        return f"norms become gain · tanh(alpha · x) + offset, {alpha}"

    def sites(self, survey: Survey) -> Sites:
        """One site for every norm of a stream."""
        norms = [norm for norm in survey.anatomy.norms if norm.role in _ROLES and chosen(norm.path, self.only)]
        kinds = ("dyt", "affine", "identity")
        found = [self._site(survey, norm) for norm in norms if norm.executed and norm.kind not in kinds]
        return Sites.of(found)

    def _site(self, survey: Survey, norm: NormSite) -> Site | Refusal:
        form = form_of(survey, norm)
        if isinstance(form, str):
            return Refusal(norm.path, form)
        module = module_at(survey.model, norm.path)
        if hasattr(module, _ALPHA) or has_layer(module, DynamicTanh):
            return Refusal(norm.path, f"it has an attribute {_ALPHA} already")
        if self.start == "calibrated" and (why := why_shared(survey, norm)) is not None:
            return Refusal(norm.path, f'{why}, and the factor on it is its own; start="unit" leaves the gain')
        form, added = _with_own(form, self.start == "calibrated")
        calibrated = (norm.weight, norm.bias) if self.start == "calibrated" else ()
        touched = tuple(name for name in calibrated if name is not None)
        names = tuple(full_name(norm.path, name) for name in added)
        detail, held = (form, norm.size), bytes_of(survey.model, touched)
        return Site(norm.path, f"{norm.kind} becomes dyt", touched, names, undo_bytes=held, detail=detail)

    def change(self, model: nn.Module, site: Site, undo: ExitStack) -> None:
        """Register alpha, keep the gain for undo, and lay Dynamic Tanh over the norm."""
        form, size = site.detail
        module = module_at(model, site.path)
        like = next((p for p in module.parameters(recurse=False)), next(iter(model.parameters())))
        for name in site.added:
            own = name.rpartition(".")[2]
            start = {_ALPHA: torch.full((), _START), _GAIN: torch.ones(size), _OFFSET: torch.zeros(size)}[own]
            module.register_parameter(own, nn.Parameter(start.to(dtype=like.dtype, device=like.device)))
        for name in site.touched:
            set_values(model.get_parameter(name), model.get_parameter(name), undo)
        module.__dict__[DynamicTanh.KEY] = form
        lay(module, DynamicTanh, site.path)

    def weightless(self, sites: tuple[Site, ...]) -> bool:
        """Not where something is measured."""
        return self.start == "unit" and super().weightless(sites)

    def fit(self, model: nn.Module, sites: tuple[Site, ...], inputs: Inputs) -> None:
        """Set alpha, gain and offset from what each norm gave."""
        if self.start == "unit":
            return
        forms = {site.path: site.detail[0] for site in sites}
        for path, found in _fitted(model, forms, inputs).items():
            _set(module_at(model, path), forms[path], found)

    def confirm(self, sites: tuple[Site, ...], anatomy: Anatomy) -> None:
        """Check that every site reads as Dynamic Tanh."""
        for site in sites:
            norm = anatomy.norm(site.path)
            if norm is None or norm.kind != "dyt":
                found = "no norm" if norm is None else norm.kind
                raise RewriteError(f"ToDyT did not take hold at {site.path}", expected="dyt", found=found)


def _with_own(form: Form, shifted: bool) -> tuple[Form, tuple[str, ...]]:
    """The form with names for the gain, and where it is `shifted` the offset, that a norm lacks; what is added."""
    own = {"weight": _GAIN} if form.weight is None else {}
    own |= {"bias": _OFFSET} if form.bias is None and shifted else {}
    return replace(form, **own), (_ALPHA, *own.values())  # type: ignore[arg-type]


def _fitted(model: nn.Module, forms: Mapping[str, Form], inputs: Inputs) -> dict[str, Nearest]:
    """The nearest tanh to what each norm does with what comes to it, in one pass in which those before it are Dynamic
    Tanh already."""
    found: dict[str, Nearest] = {}

    def fit(path: str, module: nn.Module, x: Tensor) -> None:
        if path not in found:
            found[path] = _nearest(path, module, forms[path], x.detach())
            _set(module, forms[path], found[path])  # for this pass; the guard takes it back

    with ExitStack() as hooks, untouched(model) as keeper, torch.no_grad():
        for path in forms:
            module = module_at(model, path)
            handle = module.register_forward_pre_hook(lambda m, args, path=path: fit(path, m, args[0]))
            hooks.callback(handle.remove)
        with keeper.mode():
            invoke(model, inputs)
    return found


def _nearest(path: str, module: nn.Module, form: Form, x: Tensor) -> Nearest:
    rows = x.reshape(-1, x.shape[-1])
    rows = rows[:: max(1, len(rows) // max(_ROWS, _ELEMENTS // x.shape[-1]))].double()
    gain, _ = acting(module, form)
    found = nearest(rows, written(rows, form) * gain, gain)
    if not math.isfinite(found.alpha):
        what = "inputs that are 0 or the same everywhere, or not finite"
        raise RewriteError(f"ToDyT cannot fit {path}", expected="inputs with a signal", found=what)
    return found


def _set(module: nn.Module, form: Form, found: Nearest) -> None:
    assert form.weight is not None
    assert form.bias is not None
    weight, bias = module.get_parameter(form.weight), module.get_parameter(form.bias)
    with writable(weight, bias):
        module.get_parameter(_ALPHA).fill_(found.alpha)
        gain, offset = acting(module, form)
        weight.copy_(gain * found.scale - float(form.one_plus))
        bias.copy_(offset + found.shift)
