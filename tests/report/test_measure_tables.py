"""Rows that the measures on demand give to every form of the report."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from normprobe import probe
from normprobe.report.render import document
from tests.models import decoder


@pytest.fixture(scope="module")
def plain() -> nn.Module:
    """Two orthogonal matrices times 1.5, which make every number known."""
    layers = [nn.Linear(16, 16, bias=False) for _ in range(2)]
    for layer in layers:
        nn.init.orthogonal_(layer.weight, gain=1.5)
    return nn.Sequential(*layers)


def text_of(model: nn.Module, measure: str) -> str:
    return document(probe(model, torch.randn(4, 16), measures=(measure,)).data, "markdown")


def test_gain(plain: nn.Module) -> None:
    text = text_of(plain, "gain")
    assert "## Gain of the model itself" in text
    both = "×2.25 over 2 layers, ×1.5 each on average"
    assert f"forward {both}; backward {both}" in text
    assert "| `1` | 1.5 | 1.5 |" in text


def test_jacobian(plain: nn.Module) -> None:
    text = text_of(plain, "jacobian")
    assert "| `input to output` | 5.06 |" in text
    assert "| `the model itself, all layers` | 5.06 |" in text
    assert "| `0` | 2.25 |" in text


def test_smoothness(plain: nn.Module) -> None:
    text = text_of(plain, "smoothness")
    assert "Lipschitz constant of the gradient along the step" in text
    assert "| `0.0001 of ‖weights‖` |" in text


def test_depth() -> None:
    model, ids = decoder("pre")
    found = probe(model, ids, measures=("depth",))
    text = document(found.data, "markdown")
    table = text.split("## Skipped branches")[1].split("## Readout by depth")[0]
    told = [line.split("|")[1].strip(" `") for line in table.splitlines() if "blocks." in line]
    measured = found.data.measurements.depth
    assert measured is not None
    ranked = sorted(measured.branches, key=lambda one: one.effect.kl or 0)
    assert told == [f"{one.path} ({one.kind})" for one in ranked]
    assert "| `blocks.1` |" in text.split("## Readout by depth")[1]


class Looped(nn.Module):
    """One block that runs three times, then two whose adds run in the whole model's own forward."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(16), nn.Linear(16, 32), nn.Linear(32, 16)
        self.blocks = nn.ModuleList(nn.Sequential(nn.LayerNorm(16), nn.Linear(16, 16)) for _ in range(2))
        self.head = nn.Linear(16, 5)

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(3):
            x = x + self.down(self.up(self.norm(x)).relu())
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)


def test_skipped_branches_have_names_of_their_own() -> None:
    text = document(probe(Looped(), torch.randn(4, 16), measures=("depth",)).data, "markdown")
    table = text.split("## Skipped branches")[1].split("## Readout by depth")[0]
    told = sorted(line.split("|")[1].strip(" `") for line in table.splitlines()[6:] if line.startswith("|"))
    assert told == [". (mlp), run 1", ". (mlp), run 2", ". (mlp), run 3", "blocks.0.1 (mlp)", "blocks.1.1 (mlp)"]
