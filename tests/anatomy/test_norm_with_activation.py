"""Modules that hold a norm and the activation behind it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.anatomy.reading import anatomy_of, only_stream

CHANNELS = 8


class BatchNormAct(nn.BatchNorm2d):
    """Batch norm whose forward goes on with an activation module."""

    def __init__(self) -> None:
        super().__init__(CHANNELS)
        self.act = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.act(super().forward(x))
        return y


class FrozenAct(nn.Module):
    """A batch norm on stored statistics alone, with an activation."""

    def __init__(self) -> None:
        super().__init__()
        for name, value in (("weight", 1.5), ("bias", 0.1), ("mean", 0.2), ("variance", 2.0)):
            self.register_buffer(name, torch.full((1, CHANNELS, 1, 1), value))

    def forward(self, x: Tensor) -> Tensor:
        scale = self.weight * (self.variance + 1e-3).rsqrt()
        return F.silu(x * scale + self.bias - self.mean * scale)


class LayerNormAct2d(nn.LayerNorm):
    """Layer norm over the channels of a map, then GELU."""

    def forward(self, x: Tensor) -> Tensor:
        x = F.layer_norm(x.permute(0, 2, 3, 1), self.normalized_shape, self.weight, self.bias, self.eps)
        return F.gelu(x.permute(0, 3, 1, 2))


class GainThenAct(nn.Module):
    """A root mean square norm with ReLU: as a whole it keeps its scale and has a gain as well."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((1, CHANNELS, 1, 1), 1.2))

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(x * torch.rsqrt(x.square().mean(1, keepdim=True) + 1e-4) * self.weight)


class ThresholdedResponse(nn.Module):
    """Filter response norm with its learned threshold (Singh & Krishnan 2020)."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.bias, self.tau = (nn.Parameter(torch.full((1, CHANNELS, 1, 1), v)) for v in (1.2, 0.3, -0.1))

    def forward(self, x: Tensor) -> Tensor:
        x = x * torch.rsqrt(x.square().mean((2, 3), keepdim=True) + 1e-4)
        return torch.maximum(x * self.weight + self.bias, self.tau)


class Preact(nn.Module):
    """Two blocks `x + conv(act(norm(x)))`."""

    def __init__(self, norms: list[nn.Module]) -> None:
        super().__init__()
        self.norms = nn.ModuleList(norms)
        self.convs = nn.ModuleList(nn.Conv2d(CHANNELS, CHANNELS, 3, padding=1) for _ in norms)

    def forward(self, x: Tensor) -> Tensor:
        for norm, conv in zip(self.norms, self.convs, strict=True):
            x = x + conv(norm(x))
        return x


@pytest.mark.parametrize(
    ("build", "facts"),
    [
        (BatchNormAct, {"kind": "batchnorm", "affine": "weight+bias", "eps": 1e-5, "frozen": False}),
        (FrozenAct, {"kind": "batchnorm", "affine": "weight+bias", "eps": 1e-3, "frozen": True}),
        (lambda: LayerNormAct2d(CHANNELS), {"kind": "layernorm", "affine": "weight+bias", "reduction": "native"}),
        (GainThenAct, {"kind": "rmsnorm", "affine": "weight", "eps": 1e-4, "axes": (1,)}),
        (ThresholdedResponse, {"kind": "rmsnorm", "affine": "weight+bias", "eps": 1e-4}),
    ],
)
def test_a_norm_that_goes_on_with_an_activation_is_read_as_the_module(
    build: Callable[[], nn.Module], facts: dict[str, object]
) -> None:
    anatomy = anatomy_of(Preact([build(), build()]).eval(), torch.randn(2, CHANNELS, 6, 6))
    assert [n.path for n in anatomy.norms] == ["norms.0", "norms.1"]
    for norm in anatomy.norms:
        assert norm.module
        assert {name: getattr(norm, name) for name in facts} == facts
    assert {b.placement for b in only_stream(anatomy).branches} == {"preact"}
