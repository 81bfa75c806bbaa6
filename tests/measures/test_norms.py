"""Norms at work: fits against closed forms, curves and gains against plain torch, and what is left out."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import normprobe
from normprobe.measures.curves import bend, grouped
from normprobe.records.norm_curves import NormCurve
from normprobe.report.tables import tables
from normprobe.report.wording import KINDS
from tests.models import MODELS
from tests.test_no_trace import lived_in
from tests.trace import Snapshot

SEED = torch.Generator().manual_seed(3)


def measured(model: nn.Module, x: Any) -> tuple[NormCurve, ...]:
    found = normprobe.probe(model, x, measures=("norms",)).data.measurements.norms
    assert found is not None
    return found.norms


def normal(*shape: int, seed: int = 3) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize(("alpha", "scale", "size"), [(0.8, 2.5, 1.0), (0.02, -1.5, 100.0), (300.0, 1.0, 0.01)])
def test_a_tanh_is_found_again(alpha: float, scale: float, size: float) -> None:
    x = normal(500).double() * size
    found = bend(x, scale * torch.tanh(alpha * x))
    assert found.alpha == pytest.approx(alpha, rel=1e-5)
    assert found.scale == pytest.approx(scale, rel=1e-5)
    assert found.tanh_fit == pytest.approx(1.0, abs=1e-9)
    assert found.linear_fit < 0.999


def test_a_line_and_noise_and_nothing() -> None:
    x, noise = normal(2000).double(), normal(2000, seed=4).double()
    assert bend(x, 3 * x).linear_fit == pytest.approx(1.0, abs=1e-12)
    fit = bend(x, x + noise).linear_fit
    assert fit == pytest.approx(float(torch.corrcoef(torch.stack((x, x + noise)))[0, 1] ** 2), abs=2e-3)
    assert all(math.isnan(value) for value in bend(x, 0 * x))
    assert all(math.isnan(value) for value in bend(x, x / 0))


def test_groups_are_means_by_rising_input() -> None:
    x = torch.tensor([4.0, 1.0, 3.0, 2.0], dtype=torch.float64)
    assert grouped(x, -x, 2) == [(1.5, -1.5), (3.5, -3.5)]
    assert grouped(x, x, 9) == [(1.0, 1.0), (2.0, 2.0), (3.0, 3.0), (4.0, 4.0)]


class Dyt(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.alpha, self.gamma = nn.Parameter(torch.tensor([0.7])), nn.Parameter(torch.linspace(0.5, 2.0, 8))
        self.beta = nn.Parameter(torch.linspace(-1.0, 1.0, 8))

    def forward(self, x: Tensor) -> Tensor:
        return self.gamma * torch.tanh(self.alpha * x) + self.beta


def test_a_dynamic_tanh_gives_its_own_alpha() -> None:
    (found,) = measured(nn.Sequential(nn.Linear(8, 8), Dyt(), nn.Linear(8, 3)), normal(4, 6, 8) * 2)
    assert (found.path, found.kind, found.basis.exact) == ("1", "dyt", True)
    assert found.alpha == pytest.approx(0.7, rel=1e-4)
    assert found.scale == pytest.approx(1.0, rel=1e-4)
    assert found.tanh_fit == pytest.approx(1.0, abs=1e-8)


def drawn(norm: nn.Module) -> nn.Module:
    with torch.no_grad():
        for parameter in norm.parameters():
            parameter.add_(0.3 * torch.randn(parameter.shape, generator=SEED))
    return norm.eval()


@pytest.mark.parametrize(
    ("norm", "shape"),
    [
        (nn.LayerNorm(8), (4, 6, 8)),
        (nn.RMSNorm(8), (4, 6, 8)),
        (nn.LayerNorm((6, 8)), (4, 6, 8)),
        (nn.BatchNorm2d(6), (4, 6, 6, 6)),
        (nn.GroupNorm(2, 6), (4, 6, 6, 6)),
    ],
)
def test_gain_and_offset_are_taken_off(norm: nn.Module, shape: tuple[int, ...]) -> None:
    norm, x = drawn(norm), normal(*shape) * 3
    (found,) = measured(nn.Sequential(norm), x)
    with torch.no_grad():
        plain = type(norm)(*((norm.num_groups, 6) if isinstance(norm, nn.GroupNorm) else (norm.weight.shape,)))
        if isinstance(norm, nn.BatchNorm2d):
            plain = nn.BatchNorm2d(6).eval()
        z = plain(x).double().flatten()
    assert found.basis.count == x.numel()
    for point, (a, b) in zip(found.points, grouped(x.double().flatten(), z, 32), strict=True):
        assert (point.input, point.output) == (pytest.approx(a, rel=1e-5), pytest.approx(b, abs=1e-5))


class ChannelsFirst(nn.LayerNorm):
    """A layer norm over axis 1."""

    def forward(self, x: Tensor) -> Tensor:
        mean, square = x.mean(1, keepdim=True), x.var(1, keepdim=True, correction=0)
        return (x - mean) / (square + self.eps).sqrt() * self.weight[:, None, None] + self.bias[:, None, None]


def test_a_gain_along_axis_1() -> None:
    norm, x = drawn(ChannelsFirst(6)), normal(4, 6, 6, 6)
    (found,) = measured(nn.Sequential(norm), x)
    z = torch.nn.functional.layer_norm(x.double().movedim(1, -1), (6,)).movedim(-1, 1).flatten()
    expected = grouped(x.double().flatten(), z, 32)
    assert [point.output for point in found.points] == pytest.approx([b for _, b in expected], abs=1e-4)


class OnePlus(nn.Module):
    """Stores its gain less 1."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(-0.5, 0.5, 8))

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * (1 + self.weight)


def test_a_gain_that_is_stored_less_one() -> None:
    (found,) = measured(nn.Sequential(OnePlus()), normal(5, 8))
    assert found.gain is not None
    assert (found.gain.smallest, found.gain.largest) == (0.5, 1.5)
    z = torch.nn.functional.rms_norm(normal(5, 8).double(), (8,), eps=1e-6).flatten()
    expected = grouped(normal(5, 8).double().flatten(), z, 32)
    assert [point.output for point in found.points] == pytest.approx([b for _, b in expected], abs=1e-5)


def test_statistics_of_the_gain() -> None:
    norm = nn.LayerNorm(8)
    with torch.no_grad():
        norm.weight.copy_(torch.tensor([1.0, 1.0, 1.0, -2.0, 0.0, 1.0, 1.0, 0.001]))
    (found,) = measured(nn.Sequential(norm), normal(5, 8))
    gain = found.gain
    assert gain is not None
    assert (gain.count, gain.smallest, gain.largest) == (8, -2.0, 1.0)
    assert (gain.negative, gain.tiny) == (1 / 8, 2 / 8)
    assert gain.mean == pytest.approx(3.001 / 8)
    assert gain.std == pytest.approx(float(norm.weight.detach().double().std(correction=0)))
    assert found.basis.count == 5 * 7  # an element whose gain is 0 shows nothing of what came before it
    assert not found.basis.exact


@pytest.mark.parametrize("name", ["llama", "bert", "t5", "gemma2", "decoder_rms"])
def test_every_kind_of_model_is_measured_and_left_as_it_was(name: str) -> None:
    model, inputs = lived_in(MODELS[name]())
    before = Snapshot(model, inputs)
    found = measured(model, inputs)
    before.assert_kept()
    assert len(found) > 3
    assert all(0 <= each.linear_fit <= each.tanh_fit + 1e-6 <= 1 + 2e-6 for each in found)
    assert all(each.gain is not None for each in found)


def test_the_table_has_the_nearest_to_tanh_first() -> None:
    model = nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 8), Dyt())
    *_, table = tables(normprobe.probe(model, normal(4, 8) * 3, measures=("norms",)).data)
    assert [row[:2] for row in table.rows] == [("2", KINDS["dyt"]), ("0", KINDS["layernorm"])]
    assert all(len(row) == len(table.columns) for row in table.rows)
    first = dict(zip(table.columns, table.rows[0], strict=True))
    assert (first["alpha"], first["scale"], first["gain range"]) == ("0.7", "1", "0.5 to 2")
