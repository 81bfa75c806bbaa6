"""Second moments across products: closed forms and the tensors themselves."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import normprobe
from normprobe.records.products import ProductsMeasure
from normprobe.report.tables import tables


def products_of(model: nn.Module, inputs: Any) -> ProductsMeasure:
    found = normprobe.probe(model.eval(), inputs, measures="products").measurements.products
    assert found is not None
    return found


def test_second_moment_gain_of_kaiming_and_of_one_over_fan_in() -> None:
    """A ReLU halves the second moment: 2 / fan_in makes up for it, 1 / fan_in does not (He et al. 2015, eq. 10)."""

    class Stack(nn.Module):
        def __init__(self, variance: float) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(256, 256, bias=False) for _ in range(3))
            for layer in self.layers:
                nn.init.normal_(layer.weight, std=math.sqrt(variance / 256))

        def forward(self, x: Tensor) -> Tensor:
            for layer in self.layers:
                x = F.relu(layer(x))
            return x

    for variance in (1.0, 2.0):
        found = products_of(Stack(variance), torch.randn(64, 256))
        assert len(found.products) == 3
        for product in found.products:
            assert product.gain == pytest.approx(variance, rel=0.15)


def test_second_moment_gain_is_that_of_the_tensors_without_their_biases() -> None:
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Flatten(), nn.Linear(8 * 36, 5)).eval()
    x = torch.randn(2, 3, 8, 8)
    with torch.no_grad():
        model[0].bias.fill_(3.0)
        y = model[0](x)
        z = model[2](y.flatten(1))
        conv_square, linear_square = (
            (t.double() - layer.bias.view(shape)).square().mean()
            for t, layer, shape in ((y, model[0], (-1, 1, 1)), (z, model[2], (-1,)))
        )
    conv, linear = products_of(model, x).products
    assert conv.gain == pytest.approx(float(conv_square / x.double().square().mean()), rel=1e-5)
    assert linear.gain == pytest.approx(float(linear_square / y.double().square().mean()), rel=1e-5)
    assert conv.basis.exact
    assert conv.basis.count == 2 * 8 * 36


@pytest.mark.parametrize("layout", ["contiguous", "transposed", "scaled", "many"])
def test_the_gain_is_the_same_in_every_layout(layout: str) -> None:
    """torch adds the bias in the product itself or after it, as the layout of the input has it."""

    class Head(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(16, 12)
            nn.init.orthogonal_(self.layer.weight, 1.5)
            nn.init.constant_(self.layer.bias, 4.0)

        def forward(self, x: Tensor) -> Tensor:
            if layout == "transposed":
                return self.layer(x.transpose(0, 1).contiguous().transpose(0, 1))
            if layout == "scaled":
                return torch.addmm(self.layer.bias, x.flatten(0, 1), self.layer.weight.T, beta=-2.0)
            return self.layer(x.repeat(1, 8, 1) if layout == "many" else x)

    torch.manual_seed(0)
    (product,) = products_of(Head(), torch.randn(8, 40, 16)).products
    assert product.gain == pytest.approx(1.5**2, rel=0.05)
    assert product.basis.exact is (layout != "many")


def test_a_zero_input_is_said_and_a_model_without_products_too() -> None:
    report = normprobe.probe(nn.Linear(4, 4, bias=False), torch.zeros(2, 4), measures="products")
    assert report.measurements.products is None
    assert [s.why for s in report.skipped if s.what.startswith("product with")] == ["what went in was 0"]
    broken = nn.Linear(4, 4, bias=False)
    nn.init.constant_(broken.weight, math.inf)
    report = normprobe.probe(broken, torch.ones(2, 4), measures="products")
    why = "a value of what went in or came out was not finite"
    assert [s.why for s in report.skipped if s.what == "product with weight"] == [why]
    report = normprobe.probe(nn.ReLU(), torch.randn(2, 4), measures="products")
    assert (
        "no product or convolution with a weight was seen as an operation of its own; a kernel may hold some inside"
        in [s.why for s in report.skipped]
    )


def test_the_table_has_the_farthest_from_1_first() -> None:
    model = nn.Sequential(*(nn.Linear(32, 32, bias=False) for _ in range(2)))
    for layer, gain in zip(model, (1.1, 3.0), strict=True):
        nn.init.orthogonal_(layer.weight, gain)
    *_, table = tables(normprobe.probe(model, torch.randn(64, 32), measures="products").data)
    assert [row[0] for row in table.rows] == ["1.weight", "0.weight"]
    assert float(table.rows[0][2]) == pytest.approx(9.0, rel=1e-3)


class First(nn.Module):
    """Its weight is the first factor of the product, and lies somewhere in a larger storage."""

    def __init__(self, start: int) -> None:
        super().__init__()
        self.weight = nn.Parameter((torch.randn(2 * 64 * 64) / 8)[start : start + 64 * 64].view(64, 64))

    def forward(self, x: Tensor) -> Tensor:
        return self.weight @ x


@pytest.mark.parametrize("start", [0, 64 * 64])
@pytest.mark.parametrize("autocast", [None, "bfloat16"])
def test_a_weight_that_is_the_first_factor_is_told_from_the_signal(start: int, autocast: str | None) -> None:
    """Under automatic mixed precision the factor is a copy of the weight."""
    report = normprobe.probe(First(start), 10 * torch.randn(64, 100), measures="products", autocast=autocast)
    assert report.measurements.products is not None
    (product,) = report.measurements.products.products
    assert product.gain == pytest.approx(1.0, rel=0.1)


@pytest.mark.parametrize("size", [1e-30, 1.0, 1e25])
def test_squares_that_float32_cannot_hold(size: float) -> None:
    layer = nn.Linear(64, 64)
    nn.init.orthogonal_(layer.weight, 3.0)
    nn.init.zeros_(layer.bias)
    (product,) = products_of(layer, size * torch.randn(100, 64)).products
    assert product.gain == pytest.approx(9.0, rel=1e-4)


def test_an_expert_that_gets_no_token_is_said() -> None:
    class Routed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.idle = nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False)

        def forward(self, x: Tensor) -> Tensor:
            return torch.cat([self.used(x), self.idle(x[:0])])

    report = normprobe.probe(Routed(), torch.randn(4, 8), measures="products")
    why = "nothing but padding, or no entry at all, went in"
    assert [s.why for s in report.skipped if s.what == "product with idle.weight"] == [why]
