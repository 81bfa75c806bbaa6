"""What the second of two norms in a row changes, against float64."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import normprobe
from tests import models

WIDTH = models.WIDTH


class Ended(nn.Module):
    """An encoder of post-norm blocks and what stands behind it."""

    def __init__(self, end: Callable[[Tensor], Tensor], **norms: nn.Module) -> None:
        super().__init__()
        self.encoder, _ = models.torch_encoder(norm_first=False, final=False)
        self.end = end
        for name, norm in norms.items():
            self.add_module(name, norm)

    def forward(self, x: Tensor) -> Tensor:
        return self.end(self.encoder(x))


def drawn(norm: nn.Module, seed: int = 3) -> nn.Module:
    return models.shuffled(norm, seed)


def measured(model: nn.Module, x: Tensor, level: Any = "forward") -> dict[str, float]:
    report = normprobe.probe(model.eval(), x, level=level)
    return {one.path: one.change for one in report.data.measurements.repeated_norms}


def change(norm: nn.Module, x: Tensor) -> float:
    double = norm.double()
    y = double(x.double())
    return float((y - x.double()).norm() / x.double().norm())


@pytest.mark.parametrize("make", [nn.LayerNorm, nn.RMSNorm])
def test_the_change_is_that_of_a_float64_reference(make: Callable[[int], nn.Module]) -> None:
    norm = drawn(make(WIDTH))
    model = Ended(lambda x: norm(x), norm=norm)
    x = torch.randn(2, 8, WIDTH)
    found = measured(model, x)
    with torch.no_grad():
        assert found == {"norm": pytest.approx(change(norm, model.encoder(x)), rel=1e-5)}


def test_two_norms_at_their_start_change_nothing() -> None:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(WIDTH, 4, 48, batch_first=True, dropout=0.0)
    encoder = nn.TransformerEncoder(layer, 2, nn.LayerNorm(WIDTH), enable_nested_tensor=False)
    x = torch.randn(2, 8, WIDTH)
    found = measured(encoder, x)
    assert found.keys() == {"norm"}
    assert found["norm"] < 1e-4
    (finding,) = [f for f in normprobe.probe(encoder, x).findings if f.code == "NP202"]
    assert finding.message.endswith(f"; it changes its input by {100 * found['norm']:.4g} %")


def test_a_norm_that_is_called_twice_is_measured_at_its_second_call() -> None:
    norm = drawn(nn.LayerNorm(WIDTH))
    model = Ended(lambda x: norm(norm(2.0 * torch.relu(x))), norm=norm)
    x = torch.randn(2, 8, WIDTH)
    with torch.no_grad():
        once = norm(2.0 * torch.relu(model.encoder(x)))
        expected = change(norm, once)
    norm.float()
    assert measured(model, x) == {"norm": pytest.approx(expected, rel=1e-5)}


def test_nothing_is_measured_of_single_norms_nor_without_a_forward() -> None:
    x = torch.randn(2, 8, WIDTH)
    assert measured(*models.torch_encoder(norm_first=True, final=True)) == {}
    norm = drawn(nn.LayerNorm(WIDTH))
    assert measured(Ended(lambda y: norm(y), norm=norm), x, level="structure") == {}


def test_a_signal_of_zeros_has_no_share_and_nan_stays_nan() -> None:
    first, second = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
    nn.init.zeros_(first.weight)
    assert math.isnan(measured(nn.Sequential(first, second), torch.randn(2, WIDTH))["1"])
    nn.init.constant_(first.weight, math.nan)
    assert math.isnan(measured(nn.Sequential(first, second), torch.randn(2, WIDTH))["1"])
