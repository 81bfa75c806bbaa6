"""Tiny models with planted faults, rewrites that fail on purpose, and snapshots of everything a model is."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from normprobe.records import Anatomy
from normprobe.rewrites import Effect, Plan, Rewrite, Site, Sites, Survey, make_plan
from tests.models import WIDTH, Built, decoder
from tests.norms import zoo


def narrow() -> nn.Module:
    """RMSNorm with weight that squares in its input's dtype."""
    return zoo.RMSNorm(upcast=False)


class HeadNorm(nn.Module):
    """RMSNorm over heads of 8 features, all in the input's dtype."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(8))

    def forward(self, x: Tensor) -> Tensor:
        rows = x.unflatten(-1, (-1, 8))
        return (rows * torch.rsqrt(rows.pow(2).mean(-1, keepdim=True) + 1e-6) * self.weight).flatten(-2)


class Returning(nn.Module):
    """Casts to the dtype of its weight by itself: parameters have to be widened too."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        x = x.to(self.weight.dtype)
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * self.weight


class Stubborn(nn.Module):
    """Squares in bfloat16 whatever it is given."""

    def forward(self, x: Tensor) -> Tensor:
        half = x.half() if x.dtype is torch.float16 or x.dtype is torch.float32 else x
        return x * torch.rsqrt(half.pow(2).mean(-1, keepdim=True) + 1e-6).to(x.dtype)


class Normalized(nn.Module):
    """`F.normalize`: a fused reduction, and a clamp in the input's dtype."""

    def forward(self, x: Tensor) -> Tensor:
        return F.normalize(x, dim=-1, eps=1e-12)


class Inline(nn.Module):
    """The norm is written out in the forward."""

    def __init__(self) -> None:
        super().__init__()
        self.read = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.read(x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6))


def narrow_decoder(**options: Any) -> Built:
    return decoder("pre", norm=narrow, layers=2, **options)


def outputs(model: nn.Module, inputs: Any) -> Tensor:
    """The first tensor that a model returns, without gradients."""
    with torch.no_grad():
        out = model(**inputs) if isinstance(inputs, dict) else model(inputs)
    found: Tensor = out if isinstance(out, Tensor) else out[0]
    return found


def applied(model: nn.Module, inputs: Any, *rewrites: Rewrite) -> Plan:
    """The plan of these rewrites, applied."""
    return make_plan(model, rewrites, inputs).apply()


def double(built: Built) -> Built:
    """A model and its inputs in float64."""
    model, inputs = built
    return model.double(), inputs.double() if isinstance(inputs, Tensor) else inputs


def snapshot(model: nn.Module) -> dict[str, Any]:
    """Every tensor's identity and bits, every module's identity, class and own names."""
    facts: dict[str, Any] = {}
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        facts[f"tensor {name}"] = (id(tensor), tensor.dtype, tensor.detach().reshape(-1).view(torch.uint8).tolist())
    for name, module in model.named_modules():
        facts[f"module {name}"] = (id(module), type(module), sorted(module.__dict__), list(module._modules))
    return facts


@dataclass(frozen=True)
class Scaled(Rewrite):
    """Says it is exact, and multiplies the parameters of `paths` by `factor` in place."""

    name: ClassVar[str] = "Scaled"
    effect = Effect.EXACT
    factor: float = 1.0
    paths: tuple[str, ...] = ()
    fail_at: str = ""

    def describe(self) -> str:
        return "a planted fault"

    def sites(self, survey: Survey) -> Sites:
        return Sites(tuple(Site(path, f"times {self.factor}", touched=(f"{path}.weight",)) for path in self.paths))

    def change(self, model: nn.Module, site: Site, undo: ExitStack) -> None:
        weight = model.get_parameter(f"{site.path}.weight")
        kept = weight.detach().clone()
        undo.callback(lambda: weight.data.copy_(kept))
        with torch.no_grad():
            weight.mul_(self.factor)
        if site.path == self.fail_at:
            raise ValueError("planted failure")

    def confirm(self, sites: tuple[Site, ...], anatomy: Anatomy) -> None:
        return
