"""Norms that take their statistic in half precision compute in float32."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from normprobe.capture.trace import Call, Trace
from normprobe.errors import RewriteError
from normprobe.norms.identify import identify_module
from normprobe.records import Anatomy, NormSite, NormSpec
from normprobe.rewrites.base import Effect, Refusal, Rewrite, Site, Sites, Survey, module_at
from normprobe.rewrites.swap import Layer, has_layer, lay, shell, why_not

_HALF = (torch.float16, torch.bfloat16)
_SAME = ("kind", "subtracts_mean", "affine", "weight", "bias", "axes", "groups", "size")


@final
class Upcast(Layer):
    """Runs the forward below in float32 where the first floating argument is float16 or bfloat16.

    Its own parameters and buffers enter as float32 values too, through a twin that lives for one call; so it works
    for plain operations and for fused kernels that want one dtype, gradients reach the parameters, and nothing of the
    module is written. Every other dtype goes straight through, bit for bit as before.
    """

    NOTE = "half precision computed in float32 (normprobe)"

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """As the module's own forward, any shapes; floating outputs come back in the input's dtype."""
        dtype = _dtype(args, kwargs)
        if dtype not in _HALF:
            return super().forward(*args, **kwargs)
        args, kwargs = pytree.tree_map_only(Tensor, _wide, (args, kwargs))
        output = _twin(self).normprobe_below(*args, **kwargs)
        return pytree.tree_map_only(Tensor, partial(_narrow, dtype), output)

    def normprobe_below(self, *args: Any, **kwargs: Any) -> Any:
        """The forward below."""
        return super().forward(*args, **kwargs)


def _dtype(args: Any, kwargs: Any) -> torch.dtype | None:
    leaves = pytree.tree_leaves((args, kwargs))
    return next((t.dtype for t in leaves if isinstance(t, Tensor) and t.is_floating_point()), None)


def _wide(tensor: Tensor) -> Tensor:
    return tensor.float() if tensor.dtype in _HALF else tensor


def _narrow(dtype: torch.dtype, tensor: Tensor) -> Tensor:
    return tensor.to(dtype) if tensor.dtype is torch.float32 else tensor


def _twin(module: Upcast) -> Upcast:
    """The module with its own tensors in float32; all else is shared."""
    twin: Upcast = object.__new__(type(module))
    twin.__dict__.update(module.__dict__)
    for kind in ("_parameters", "_buffers"):
        named = module.__dict__[kind].items()
        twin.__dict__[kind] = {name: None if held is None else _wide(held) for name, held in named}
    return twin


@final
@dataclass(frozen=True)
class UpcastNorms(Rewrite):
    """Every norm that takes its statistic in the dtype of its input computes in float32 and gives back that dtype.

    Exact: in float32 and wider the outputs stay equal bit for bit. In float16 and bfloat16 they come closer to what
    the same model gives in float32, and squares no longer overflow at |x| = 256 (Micikevicius et al. 2018, sec. 3.3).
    A norm whose fused reduction is right but whose eps is applied in half precision afterwards is upcast too. Module
    objects, parameters and the keys of the state dict stay; see `swap` for how. Every site is tried beforehand: a
    shell of the rewritten norm is identified by behaviour, and refused unless it reduces in float32 and is otherwise
    the norm that it was.
    """

    usual = Effect.EXACT

    def describe(self) -> str:
        """What it does, in one line."""
        return "norms that reduce in the dtype of their input compute in float32 and give back that dtype"

    def sites(self, survey: Survey) -> Sites:
        """One site for every norm that is a module, reduces in its input's dtype, and can be upcast."""
        sites, refused = [], []
        trial = _Trial(survey)
        for norm in survey.anatomy.norms:
            if not _narrow_norm(norm):
                continue
            why = trial.why_not(norm)
            if why is None:
                sites.append(Site(norm.path, f"{norm.kind} of {norm.class_name} computes in float32"))
            else:
                refused.append(Refusal(norm.path, why))
        return Sites(tuple(sites), tuple(refused))

    def change(self, model: nn.Module, site: Site, undo: ExitStack) -> None:
        """Lay `Upcast` over the norm's class."""
        module = module_at(model, site.path)
        why = why_not(module) or ("it is upcast already" if has_layer(module, Upcast) else None)
        if why is not None:
            raise RewriteError(
                f"UpcastNorms cannot change {site.path}", expected="the norm as it was planned", found=why
            )
        lay(module, Upcast, site.path)

    def confirm(self, sites: tuple[Site, ...], anatomy: Anatomy) -> None:
        """Check that every site reads as a norm that reduces in float32."""
        for site in sites:
            norm = anatomy.norm(site.path)
            if norm is None or norm.reduction != "float32":
                raise RewriteError(
                    f"UpcastNorms did not take hold at {site.path}",
                    expected="a norm that reduces in float32",
                    found="no norm" if norm is None else f"a {norm.kind} that reduces in {norm.reduction}",
                )


def _narrow_norm(norm: NormSite) -> bool:
    """Whether statistic or eps are in the input's dtype: eps within a fused kernel is not."""
    after_kernel = norm.reduction == "native" and norm.eps_placement in ("clamp", "outside_sqrt")
    return norm.reduction == "input" or after_kernel


class _Trial:
    """Tries norms with the layer, equal ones once."""

    def __init__(self, survey: Survey) -> None:
        self.model, self.trace = survey.model, survey.trace
        self.calls = {call.path: call for call in reversed(survey.trace.calls) if not call.composite}
        self.known: dict[Any, str | None] = {}

    def why_not(self, norm: NormSite) -> str | None:
        """Why this norm cannot be upcast; None where it can."""
        if not norm.module:
            return "it is written out inside another module's forward; there is no module to change"
        call, module = self.calls.get(norm.path), module_at(self.model, norm.path)
        if call is None or call.spec is None:
            return "it did not run, so it is not known how it is called"
        if norm.batch_dependent or norm.frozen:
            return "it keeps running statistics, which have to stay where they are"
        why = why_not(module) or _own_state(module) or _widens(call, self.trace)
        if why is not None:
            return why
        key = (type(module), repr(call.spec), repr({k: v for k, v in module.__dict__.items() if _plain(v)}))
        if key not in self.known:
            spec = identify_module(shell(module, Upcast), call.spec)
            self.known[key] = _difference(identify_module(module, call.spec), spec)
        return self.known[key]


def _plain(value: Any) -> bool:
    return isinstance(value, (bool, int, float, str, tuple, torch.dtype))


def _own_state(module: nn.Module) -> str | None:
    inner = [name for name, child in module.named_children() if any(True for _ in child.parameters())]
    inner += [name for name, child in module.named_children() if any(True for _ in child.buffers())]
    return f"parts of its state lie in modules inside it ({', '.join(inner)})" if inner else None


def _widens(call: Call, trace: Trace) -> str | None:
    """Refuse what already returns another dtype than it is given: which one is right cannot be told."""
    given = next((trace.values[v].dtype for v in call.inputs if trace.values[v].dtype.is_floating_point), None)
    made = trace.values[call.outputs[0]].dtype if call.outputs else given
    if given == made:
        return None
    return f"it is given {str(given)[6:]} and returns {str(made)[6:]}; the rewrite would return {str(given)[6:]}"


def _difference(before: NormSpec | None, after: NormSpec | None) -> str | None:
    """How the norm would differ from what it has to be; None where it is right."""
    if before is None or after is None:
        return "with the rewrite it can no longer be identified as a norm"
    if after.reduction != "float32":
        return f"with the rewrite it would still reduce in {after.reduction}: its forward casts by itself"
    changed = [field for field in _SAME if getattr(before, field) != getattr(after, field)]
    if changed:
        field = changed[0]
        return f"with the rewrite its {field} would be {getattr(after, field)}, it is {getattr(before, field)}"
    return None
