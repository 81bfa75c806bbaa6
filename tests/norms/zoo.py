"""Tiny norms with known behaviour: torch's, transformers', hand-written ones, and maps that are no norms."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from normprobe.capture.calls import CallSpec, TensorSpec

WIDTH = 32
ROWS = (2, 5, WIDTH)
MAP = (2, 16, 6, 6)


class Rule(nn.Module):
    """A module that computes `rule(self, *tensors)` with the given parameters."""

    def __init__(self, rule: Callable[..., Any], **parameters: Tensor) -> None:
        super().__init__()
        self.rule = rule
        for name, value in parameters.items():
            setattr(self, name, nn.Parameter(value))

    def forward(self, *args: Tensor) -> Any:
        return self.rule(self, *args)


def call_of(*shapes: tuple[int, ...], dtype: torch.dtype = torch.float32) -> CallSpec:
    """A call with one floating tensor of each shape."""
    return CallSpec(tuple(TensorSpec(shape, dtype, torch.device("cpu")) for shape in shapes), {})


@dataclass(frozen=True)
class Case:
    """A module, the shapes it is called with, and the facts that hold."""

    name: str
    build: Callable[[], nn.Module]
    facts: dict[str, Any]
    shapes: tuple[tuple[int, ...], ...] = (ROWS,)
    dtype: torch.dtype = torch.float32

    @property
    def call(self) -> CallSpec:
        return call_of(*self.shapes, dtype=self.dtype)


def facts(
    kind: str, affine: str, eps: float | None, placement: str, reduction: str, multiply: str, **more: Any
) -> dict[str, Any]:
    names = ("kind", "affine", "eps", "eps_placement", "reduction", "weight_multiply")
    return dict(zip(names, (kind, affine, eps, placement, reduction, multiply), strict=True)) | more


def mean_square(x: Tensor) -> Tensor:
    return x.pow(2).mean(-1, keepdim=True)


def ones(*shape: int) -> Tensor:
    return torch.ones(shape)


class RMSNorm(nn.Module):
    """x / sqrt(mean(x²) + eps) with the choices that implementations differ in."""

    def __init__(
        self,
        eps: float = 1e-6,
        *,
        placement: str = "inside_sqrt",
        upcast: bool = True,
        multiply: str = "after_cast",
        one_plus: bool = False,
    ) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(WIDTH) if one_plus else torch.ones(WIDTH))
        self.eps, self.placement, self.upcast = eps, placement, upcast
        self.multiply, self.one_plus = multiply, one_plus

    def root(self, x: Tensor) -> Tensor:
        if self.placement == "inside_sqrt":
            return (mean_square(x) + self.eps).sqrt()
        if self.placement == "outside_sqrt":
            return mean_square(x).sqrt() + self.eps
        if self.placement == "clamp":
            return mean_square(x).sqrt().clamp(min=self.eps)
        if self.placement == "scaled":
            peak = x.abs().amax(-1, keepdim=True)
            return (mean_square(x / peak) + self.eps).sqrt() * peak
        return mean_square(x).sqrt()

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float() if self.upcast else x
        z = wide / self.root(wide)
        gain = 1 + self.weight if self.one_plus else self.weight
        if self.multiply == "before_cast":
            return (z * gain.to(z.dtype)).to(x.dtype)
        return z.to(x.dtype) * gain


class LayerNorm(RMSNorm):
    """Named a layer norm, computes a root mean square norm."""


class Frozen(nn.Module):
    """Scale and shift built from stored statistics."""

    def __init__(self, eps: float = 1e-5) -> None:
        super().__init__()
        for name, value in (("weight", 1.0), ("bias", 0.0), ("running_mean", 0.0), ("running_var", 1.0)):
            self.register_buffer(name, torch.full((16,), value))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        weight, bias, mean, variance = (b.reshape(1, -1, 1, 1) for b in self.buffers())
        scale = weight * (variance + self.eps).rsqrt()
        return x * scale + (bias - mean * scale)


class Renormed(Frozen):
    """In training it uses statistics of the batch, held close to the stored ones (Ioffe 2017)."""

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            return super().forward(x)
        mean, deviation = (each.view(1, -1, 1, 1) for each in (self.running_mean, (self.running_var + self.eps).sqrt()))
        own = (x.var((0, 2, 3), keepdim=True) + self.eps).sqrt()
        shift = ((x.mean((0, 2, 3), keepdim=True) - mean) / deviation).clamp(-5, 5)
        return (x - x.mean((0, 2, 3), keepdim=True)) / own * (own / deviation).clamp(0.3, 3) + shift


class BufferScale(nn.Module):
    """A scale from a buffer that is no statistic."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.rand(WIDTH, generator=torch.Generator().manual_seed(0)))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale


class BufferTanh(BufferScale):
    """Bounded, but nothing in it is learned."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x * self.scale)


class HalfLayerNorm(nn.Module):
    """A layer norm that computes everything in the dtype it is given."""

    def __init__(self, eps: float) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(ones(WIDTH)), nn.Parameter(torch.zeros(WIDTH))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        deviation = x - x.mean(-1, keepdim=True)
        root = torch.sqrt(deviation.pow(2).mean(-1, keepdim=True) + self.eps)
        return self.weight * (deviation / root) + self.bias


class PinnedLayerNorm(nn.LayerNorm):
    """Computes in float32 with tensors that must stay in float32."""

    def forward(self, x: Tensor) -> Tensor:
        return F.layer_norm(x.float(), self.normalized_shape, self.weight, self.bias, self.eps).to(x.dtype)


class LearnedEps(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.eps = nn.Parameter(torch.tensor(1e-4))

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(mean_square(x) + self.eps.abs())


class PartialNorm(nn.Module):
    """Only the first features are normalised."""

    def __init__(self, features: int = 20) -> None:
        super().__init__()
        self.norm, self.features = nn.RMSNorm(features, eps=1e-6), features

    def forward(self, x: Tensor) -> Tensor:
        head, tail = x[..., : self.features], x[..., self.features :]
        return torch.cat([self.norm(head), tail], -1)


def grn(self: Rule, x: Tensor) -> Tensor:
    response = x.norm(dim=(1, 2), keepdim=True)
    return self.w * (x * response / (response.mean(-1, keepdim=True) + 1e-6)) + self.b + x


def grn_tokens(self: Rule, x: Tensor) -> Tensor:
    response = x.norm(dim=1, keepdim=True)
    return self.w * (x * response / (response.mean(-1, keepdim=True) + 1e-6)) + self.b + x


def over_tokens(self: Rule, x: Tensor) -> Tensor:
    """Global layer norm (Luo & Mesgarani 2019): one statistic for all tokens and features."""
    deviation = x - x.mean((1, 2), keepdim=True)
    return deviation / (deviation.square().mean((1, 2), keepdim=True) + 1e-8).sqrt() * self.w + self.b


def adaptive(self: Rule, x: Tensor, style: Tensor) -> Tensor:
    """Adaptive instance norm (Huang & Belongie 2017): mean and deviation of another map, variances unbiased."""
    (mean, root), (shift, scale) = (
        (t.mean((2, 3), keepdim=True), (t.var((2, 3), keepdim=True) + 1e-5).sqrt()) for t in (x, style)
    )
    return (x - mean) / root * scale + shift


def evolved(self: Rule, x: Tensor) -> Tensor:
    """EvoNorm-S0 of four groups (Liu et al. 2020): a swish over the deviation of the group."""
    w, b, v = (each.view(1, -1, 1, 1) for each in (self.w, self.b, self.v))
    variance = x.unflatten(1, (4, -1)).var((2, 3, 4), unbiased=False, keepdim=True)
    deviation = (variance + 1e-5).sqrt().expand(-1, -1, x.shape[1] // 4, 1, 1).flatten(1, 2)
    return x * (v * x).sigmoid() / deviation * w + b


@torch.library.custom_op("normprobe_zoo::rms_norm", mutates_args=())
def foreign_norm(x: Tensor, weight: Tensor) -> Tensor:
    """An operation that torch does not know, whose inside no recorder sees."""
    return x * torch.rsqrt(mean_square(x) + 1e-6) * weight


def unbiased(self: Rule, x: Tensor) -> Tensor:
    return self.a * (x - x.mean(-1, keepdim=True)) / (x.std(-1, keepdim=True) + 1e-6) + self.b


def gated_inside(self: Rule, x: Tensor, gate: Tensor) -> Tensor:
    return self.w * F.rms_norm(x * F.silu(gate), (WIDTH,), eps=1e-5)


def gated_outside(self: Rule, x: Tensor, gate: Tensor) -> Tensor:
    return self.w * F.rms_norm(x, (WIDTH,), eps=1e-5) * F.silu(gate)


def residual_inside(self: Rule, x: Tensor, residual: Tensor) -> Tensor:
    return self.w * F.rms_norm(x + residual, (WIDTH,), eps=1e-5)


NO_NORMS = {
    "Dropout": (lambda: nn.Dropout(0.1), (ROWS,)),
    "GELU": (nn.GELU, (ROWS,)),
    "Tanh": (nn.Tanh, (ROWS,)),
    "Tanh of a buffer": (BufferTanh, (ROWS,)),
    "PReLU": (nn.PReLU, (ROWS,)),
    "Sigmoid of a factor": (lambda: Rule(lambda self, x: torch.sigmoid(self.a * x), a=ones(1)), (ROWS,)),
    "Softmax": (lambda: nn.Softmax(-1), (ROWS,)),
    "Linear": (lambda: nn.Linear(WIDTH, WIDTH), (ROWS,)),
    "norm then linear": (lambda: nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)), (ROWS,)),
    "residual block": (lambda: Rule(lambda self, x: x + F.layer_norm(x, (WIDTH,))), (ROWS,)),
    "gate": (lambda: Rule(lambda self, x, y: x * F.silu(y)), (ROWS, ROWS)),
    "mean only": (lambda: Rule(lambda self, x: x - x.mean(-1, keepdim=True)), (ROWS,)),
    "sum to one": (lambda: Rule(lambda self, x: x / x.sum(-1, keepdim=True)), (ROWS,)),
    "causal mean": (lambda: Rule(lambda self, x: x.cumsum(1)), (ROWS,)),
    "reversal": (lambda: Rule(lambda self, x: x.flip(-1)), (ROWS,)),
    "inverse root": (lambda: Rule(lambda self, x: mean_square(x).rsqrt()), (ROWS,)),
    "clipped length": (lambda: Rule(lambda self, x: x * (2 / x.norm(dim=-1, keepdim=True)).clamp(max=1)), (ROWS,)),
    "constant": (lambda: Rule(lambda self, x: torch.zeros_like(x)), (ROWS,)),
    "Embedding": (lambda: nn.Embedding(4, WIDTH), ()),
}
