"""A norm computed from what is known of it, by its own parameters, in place of the forward that it was written with."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from normprobe.capture.calls import CallSpec, TensorSpec
from normprobe.records import NormSite
from normprobe.rewrites.base import Survey, module_at
from normprobe.rewrites.swap import Layer, has_layer, lay
from normprobe.rewrites.swap import why_not as class_stays

_INSIDE = ("inside_sqrt", "none")
_READ = 1e-3  # relative error of an eps that is recovered from the output


@dataclass(frozen=True)
class Form:
    """What a `Computed` norm computes over the last axis.

    Attributes:
        kind: "rmsnorm" leaves the mean in.
        eps: inside the root.
        weight: own name of the gain, None without one.
        bias: own name of the offset, None without one.
        one_plus: whether the gain is stored less 1.
        after_cast: whether gain and offset act in the dtype of the input, behind the cast back to it.
        fused: whether torch's fused operation computes it.
    """

    kind: Literal["layernorm", "rmsnorm"]
    eps: float
    weight: str | None = None
    bias: str | None = None
    one_plus: bool = False
    after_cast: bool = False
    fused: bool = False


@final
class Computed(Layer):
    """The norm that a `Form` states, with the parameters of the module below, whose forward is not called.

    x: (…, d) -> (…, d) in the input's dtype. The statistic is taken in float32, or in the input's dtype where that is
    wider.
    """

    NOTE = "computed by its closed form (normprobe)"
    KEY: ClassVar[str] = "_norm_form"

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """(x − mean) / √(var + eps) · gain + offset, or the same without the mean."""
        return _computed(self, x, self.__dict__[Computed.KEY])


@final
class Uncentred(Layer):
    """As `Computed`, over a norm that subtracted the mean and no longer does, as the name of the class then says."""

    NOTE = "computed without the mean (normprobe)"
    normprobe_name = "RMSNorm"
    KEY: ClassVar[str] = "_uncentred_form"

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """x / √(mean(x²) + eps) · gain + offset."""
        return _computed(self, x, self.__dict__[Uncentred.KEY])


def _computed(module: nn.Module, x: Tensor, form: Form) -> Tensor:
    gain, offset = (None if name is None else getattr(module, name) for name in (form.weight, form.bias))
    if form.fused and not form.one_plus and not form.after_cast and _fits(x, gain, offset):
        return _fused(x, form, gain, offset)
    inner = x.to(torch.promote_types(x.dtype, torch.float32))
    y = _fused(inner, form, None, None) if form.fused else written(inner, form)
    y = y.to(x.dtype) if form.after_cast else y
    if gain is not None:
        gain = gain.to(y.dtype)
        y = y * (1 + gain if form.one_plus else gain)
    if offset is not None:
        y = y + offset.to(y.dtype)
    return y.to(x.dtype)


def _fits(x: Tensor, *parameters: Tensor | None) -> bool:
    """Whether the fused operation takes these: of the input's dtype, with one number for each feature (a gain for each
    head and feature has more)."""
    return all(each is None or (each.dtype is x.dtype and each.shape == x.shape[-1:]) for each in parameters)


def _fused(x: Tensor, form: Form, gain: Tensor | None, offset: Tensor | None) -> Tensor:
    if form.kind == "layernorm":
        return F.layer_norm(x, x.shape[-1:], gain, offset, form.eps)
    y = F.rms_norm(x, x.shape[-1:], gain, form.eps)
    return y if offset is None else y + offset


def written(x: Tensor, form: Form) -> Tensor:
    """x (…, d), normed without gain and offset, in its own dtype."""
    x = x - x.mean(-1, keepdim=True) if form.kind == "layernorm" else x
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + form.eps)


def compute(
    module: nn.Module,
    form: Form,
    path: str,
    layer: type[Computed] | type[Uncentred] = Computed,
) -> None:
    """Let the module at `path` compute `form` from now on."""
    module.__dict__[layer.KEY] = form
    if not has_layer(module, layer):
        lay(module, layer, path)


def form_of(survey: Survey, norm: NormSite, eps: float | None = None) -> Form | str:
    """The form of a norm, or why it has none; with `eps` that of the same norm with this eps inside the root."""
    why = _why_not(norm, eps) or why_not_laid(survey, norm)
    if why is not None:
        return why
    weight, bias = (None if name is None else own_name(norm, name) for name in (norm.weight, norm.bias))
    return Form(
        "layernorm" if norm.subtracts_mean else "rmsnorm",
        _own_eps(survey, norm) if eps is None else eps,
        weight,
        bias,
        norm.affine.startswith("one_plus"),
        norm.weight_multiply == "after_cast",
    )


def _why_not(norm: NormSite, eps: float | None) -> str | None:
    if norm.kind not in ("layernorm", "rmsnorm") or norm.axes != (-1,) or norm.batch_dependent:
        return (
            f"it is a {norm.kind} over the axes {norm.axes}; layernorm and rmsnorm over the last axis can be computed"
        )
    if norm.unbiased:
        return "it divides by the deviation with n − 1"
    if eps is None and norm.eps_placement not in _INSIDE:
        return f"its eps is not inside the root ({norm.eps_placement})"
    if eps is None and norm.eps is None and norm.eps_placement != "none":
        return "its eps is not known"
    return "how it applies its gain could not be read" if norm.affine == "other" else None


def _own_eps(survey: Survey, norm: NormSite) -> float:
    """The eps of a norm to its last digit: the one number that its operations were given and that reads like it, since
    what is recovered from the output has four digits; that where there is no such number or several."""
    if norm.eps is None:
        return 0.0
    trace = survey.trace
    runs = [call.id for call in trace.calls if call.path == norm.path and not call.composite]
    inside = (node for node in trace.nodes if any(trace.inside(node.call, run) for run in runs))
    given = {value for node in inside for value in (*node.args, *node.kwargs.values()) if isinstance(value, float)}
    alike = [value for value in given if math.isclose(value, norm.eps, rel_tol=_READ, abs_tol=0.0)]
    return alike[0] if len(alike) == 1 else norm.eps


def why_not_laid(survey: Survey, norm: NormSite) -> str | None:
    """Why the class of a norm cannot be changed; None where it can."""
    if not norm.module:
        return "it is written out inside another module's forward; there is no module to change"
    spec = call_of(survey, norm.path)
    if spec is None:
        return "it did not run, so it is not known how it is called"
    if len(spec.tensors()) != 1 or not spec.args or not isinstance(spec.args[0], TensorSpec):
        return "it takes more than one tensor, or none by position"
    outside = [name for name in (norm.weight, norm.bias) if name is not None and "." in own_name(norm, name)]
    if outside:
        return f"{outside[0]} is no parameter of its own"
    return _other_shape(survey, norm, spec.args[0].shape) or class_stays(module_at(survey.model, norm.path))


def _other_shape(survey: Survey, norm: NormSite, given: tuple[int, ...]) -> str | None:
    """Why the closed form, whose statistic, gain and result all have the shape of what is given, is not this norm's: a
    norm over heads may split them off before its statistic, or join them before its gain."""
    if norm.size != given[-1]:
        return f"its statistic runs over {norm.size} of the {given[-1]} features that it is given"
    call = next(c for c in survey.trace.calls if c.path == norm.path and not c.composite)
    made = survey.trace.values[call.outputs[0]].shape if call.outputs else None
    if made != given:
        return f"it is given the shape {given} and returns {made}; a closed form returns what it is given"
    named = dict(survey.model.named_parameters(remove_duplicate=False))
    for name in (norm.weight, norm.bias):
        shape = tuple(named[name].shape) if name in named else ()
        pairs = zip(shape[::-1], given[::-1], strict=False)
        if len(shape) > len(given) or any(own not in (1, whole) for own, whole in pairs):
            return f"{name} has the shape {shape}, which does not fit what it is given, {given}"
    return None


def acting(module: nn.Module, form: Form) -> tuple[Tensor, Tensor]:
    """Gain and offset of a norm as they act, in float64; of one element where there is none."""
    gain, offset = torch.ones(1, dtype=torch.float64), torch.zeros(1, dtype=torch.float64)
    if form.weight is not None:
        gain = module.get_parameter(form.weight).detach().double() + float(form.one_plus)
    return gain, offset if form.bias is None else module.get_parameter(form.bias).detach().double()


def own_name(norm: NormSite, name: str) -> str:
    """The name of one of its parameters as the norm itself has it."""
    return name.removeprefix("" if norm.path == "." else norm.path + ".")


def call_of(survey: Survey, path: str) -> CallSpec | None:
    """How the module at `path` was called first; None where it did not run."""
    return next((c.spec for c in survey.trace.calls if c.path == path and not c.composite), None)
