"""Norms become Dynamic Tanh, which bounds each element and takes no statistic."""

from __future__ import annotations

import math
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, final

import torch
from torch import Tensor, nn

from normprobe.capture.guard import untouched
from normprobe.capture.invoke import Inputs, invoke
from normprobe.errors import RewriteError
from normprobe.measures.curves import bend
from normprobe.records import Anatomy, NormSite
from normprobe.rewrites.base import ChosenRewrite, Effect, Refusal, Site, Sites, Survey, full_name, module_at
from normprobe.rewrites.edits import bytes_of, chosen, set_values
from normprobe.rewrites.norms.computed import Form, form_of, written
from normprobe.rewrites.swap import Layer, has_layer, lay

_ALPHA, _GAIN = "alpha", "dyt_gain"
_START = 0.5  # Zhu et al. 2025, sec. 4
_ELEMENTS = 2**15  # of one norm that its curve is fitted to
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
        gain = self.get_parameter(_GAIN if form.weight is None else form.weight).to(wide)
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
    `dyt_gain` where it had no gain. Norms of queries and keys stay.

    Attributes:
        start: "calibrated" takes alpha, and a factor on the gain, from the tanh that is nearest to what each norm does
            on the given inputs, by least squares; "unit" sets alpha to 0.5 and leaves the gain (ibid., sec. 4).
        only: a pattern of paths of norms, or several; None for all.
    """

    usual = Effect.BREAKING
    start: Literal["calibrated", "unit"] = "calibrated"

    def __post_init__(self) -> None:
        if self.start not in ("calibrated", "unit"):
            raise RewriteError("ToDyT cannot be made", expected="start: calibrated | unit", found=repr(self.start))
        super().__post_init__()

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
        added = (_ALPHA,) if form.weight is not None else (_ALPHA, _GAIN)
        touched = (norm.weight,) if norm.weight is not None and self.start == "calibrated" else ()
        held = bytes_of(survey.model, touched)
        names = tuple(full_name(norm.path, name) for name in added)
        return Site(norm.path, f"{norm.kind} becomes dyt", touched, names, undo_bytes=held, detail=(form, norm.size))

    def change(self, model: nn.Module, site: Site, undo: ExitStack) -> None:
        """Register alpha, keep the gain for undo, and lay Dynamic Tanh over the norm."""
        form, size = site.detail
        module = module_at(model, site.path)
        like = next((p for p in module.parameters(recurse=False)), next(iter(model.parameters())))
        for name in site.added:
            own = name.rpartition(".")[2]
            start = torch.full((), _START) if own == _ALPHA else torch.ones(size)
            undo.callback(module._parameters.pop, own, None)
            module.register_parameter(own, nn.Parameter(start.to(dtype=like.dtype, device=like.device)))
        for name in site.touched:
            set_values(model.get_parameter(name), model.get_parameter(name), undo)
        undo.callback(module.__dict__.pop, DynamicTanh.KEY, None)
        module.__dict__[DynamicTanh.KEY] = form
        lay(module, DynamicTanh, site.path, undo)

    def fit(self, model: nn.Module, sites: tuple[Site, ...], inputs: Inputs) -> None:
        """Set alpha and gain from the curve that each norm had."""
        if self.start == "unit":
            return
        forms = {site.path: site.detail[0] for site in sites}
        for path, (alpha, scale) in _fitted(model, forms, inputs).items():
            _set(module_at(model, path), forms[path], alpha, scale)

    def confirm(self, sites: tuple[Site, ...], anatomy: Anatomy) -> None:
        """Check that every site reads as Dynamic Tanh."""
        for site in sites:
            norm = anatomy.norm(site.path)
            if norm is None or norm.kind != "dyt":
                found = "no norm" if norm is None else norm.kind
                raise RewriteError(f"ToDyT did not take hold at {site.path}", expected="dyt", found=found)


def _fitted(model: nn.Module, forms: Mapping[str, Form], inputs: Inputs) -> dict[str, tuple[float, float]]:
    """alpha and scale of the tanh nearest to what each norm does with what comes to it, in one pass in which those
    before it are Dynamic Tanh already."""
    found: dict[str, tuple[float, float]] = {}

    def fit(path: str, module: nn.Module, x: Tensor) -> None:
        if path not in found:
            found[path] = _nearest(path, forms[path], x.detach())
            _set(module, forms[path], *found[path])  # for this pass; the guard takes it back

    with ExitStack() as hooks, untouched(model) as keeper, torch.no_grad():
        for path in forms:
            module = module_at(model, path)
            handle = module.register_forward_pre_hook(lambda m, args, path=path: fit(path, m, args[0]))
            hooks.callback(handle.remove)
        with keeper.mode():
            invoke(model, inputs)
    return found


def _nearest(path: str, form: Form, x: Tensor) -> tuple[float, float]:
    x = x.double()
    z = written(x, form)
    step = max(1, x.numel() // _ELEMENTS)
    nearest = bend(x.flatten()[::step], z.flatten()[::step])
    if not math.isfinite(nearest.alpha):
        found = "an input that is 0 everywhere, or not finite"
        raise RewriteError(f"ToDyT cannot fit {path}", expected="inputs with a signal", found=found)
    return nearest.alpha, nearest.scale


@torch.no_grad()
def _set(module: nn.Module, form: Form, alpha: float, scale: float) -> None:
    module.get_parameter(_ALPHA).fill_(alpha)
    held = module.get_parameter(_GAIN if form.weight is None else form.weight)
    plain = held.detach().double() + float(form.one_plus)
    held.copy_(plain * scale - float(form.one_plus))
