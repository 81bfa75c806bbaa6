"""Which parameters decay, and how far a step may reach: against float64 references, on storage of every kind."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import normprobe
from normprobe.errors import SettingError
from tests import models


def loss(model: nn.Module, inputs: Any) -> Tensor:
    out = model(**inputs) if isinstance(inputs, dict) else model(inputs)
    found: Tensor = (out if isinstance(out, Tensor) else out[0]).square().mean()
    return found


# ---- decay_groups


@pytest.mark.parametrize("build", [models.gpt2, models.llama, models.bert, models.t5])
def test_norms_and_biases_are_spared(build: Any) -> None:
    model, inputs = build()
    decayed, spared = normprobe.decay_groups(model, 0.1, inputs)
    assert (decayed["weight_decay"], spared["weight_decay"]) == (0.1, 0.0)
    named = dict(model.named_parameters())
    assert sorted([*decayed["names"], *spared["names"]]) == sorted(named)
    assert {len(named[name].shape) for name in decayed["names"]} == {2}
    assert all(len(named[name].shape) == 1 for name in spared["names"] if "relative" not in name)
    torch.optim.AdamW([decayed, spared], lr=1e-3)


class Odd(nn.Module):
    """A gain of four axes, a weight of one, a frozen gain and a LayerScale of two axes."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(1, 1, 16))
        self.scale = nn.Parameter(torch.full((1, 16), 0.1))
        self.norm = nn.LayerNorm(16)
        self.norm.weight.requires_grad_(False)
        self.read, self.write = nn.Linear(16, 32), nn.Linear(32, 16)
        self.score = nn.Parameter(torch.randn(16, 2))

    def forward(self, x: Tensor) -> Tensor:
        h = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * self.gain
        x = x + self.scale * self.write(torch.relu(self.read(h)))
        return self.norm(x) @ self.score


def test_the_place_decides_and_not_the_shape() -> None:
    model = Odd()
    decayed, spared = normprobe.decay_groups(model, 0.1, torch.randn(2, 5, 16))
    assert set(decayed["names"]) == {"read.weight", "write.weight", "score"}
    assert set(spared["names"]) == {"gain", "scale", "norm.bias", "read.bias", "write.bias"}


def test_decay_that_cannot_be_is_refused() -> None:
    for wrong in (-0.1, float("nan")):
        with pytest.raises(SettingError, match="weight decay"):
            normprobe.decay_groups(nn.Linear(2, 2), wrong, torch.randn(1, 2))


# ---- AdaptiveClipping


def clipped(weight: Tensor, gradient: Tensor, axis: int, clipping: float, eps: float) -> Tensor:
    """Brock et al. 2021, eq. 3, unit by unit in float64."""
    out = gradient.double().clone()
    for i in range(weight.shape[axis]):
        w, g = weight.double().select(axis, i).norm(), out.select(axis, i)
        if float(g.norm()) > clipping * max(float(w), eps):
            g.mul_(clipping * max(float(w), eps) / g.norm())
    return out


@pytest.mark.parametrize(("name", "axis"), [("gpt2", 1), ("llama", 0)])
def test_each_unit_is_clipped_along_its_own_axis(name: str, axis: int) -> None:
    """GPT-2 stores its matrices the other way round."""
    model, inputs = getattr(models, name)(tie_word_embeddings=False)
    matrix = model.transformer.h[0].mlp.c_fc.weight if name == "gpt2" else model.model.layers[0].mlp.up_proj.weight
    optimiser = torch.optim.SGD(model.parameters(), lr=1.0)
    handle = normprobe.AdaptiveClipping(optimiser, model, inputs, clipping=1e-3, eps=1e-2)
    (1e3 * loss(model, inputs)).backward()
    before, gradient, head = matrix.detach().clone(), matrix.grad.clone(), model.lm_head.weight.grad.clone()
    wanted = clipped(before, gradient, axis, 1e-3, 1e-2)
    assert not torch.allclose(wanted, gradient.double())
    optimiser.step()
    assert torch.allclose(matrix.grad.double(), wanted, rtol=1e-5, atol=1e-9)
    assert torch.allclose(before - matrix, matrix.grad, atol=1e-6)
    assert torch.equal(model.lm_head.weight.grad, head)
    handle.remove()
    model.zero_grad()
    (1e3 * loss(model, inputs)).backward()
    kept = matrix.grad.clone()
    optimiser.step()
    assert torch.equal(matrix.grad, kept)


def test_small_gradients_and_vectors() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 1))
    optimiser = torch.optim.AdamW(model.parameters(), lr=1e-3)
    clip = normprobe.AdaptiveClipping(optimiser, model, torch.randn(2, 4), clipping=0.5)
    bias = model[0].bias
    with torch.no_grad():
        bias.copy_(torch.tensor([3.0, 4.0, 0.0, 0.0]))
    bias.grad = torch.tensor([0.0, 0.0, 30.0, 40.0])
    clip.clip(bias, (0,))
    assert torch.allclose(bias.grad, torch.tensor([0.0, 0.0, 1.5, 2.0]))
    bias.grad = torch.tensor([0.1, 0.0, 0.0, 0.0])
    clip.clip(bias, (0,))
    assert torch.equal(bias.grad, torch.tensor([0.1, 0.0, 0.0, 0.0]))
    bias.grad = torch.zeros(4)
    clip.clip(bias, (0,))
    assert torch.equal(bias.grad, torch.zeros(4))
    with pytest.raises(SettingError, match="clipping cannot be used"):
        normprobe.AdaptiveClipping(optimiser, model, torch.randn(2, 4), clipping=0.0)
    with pytest.raises(SettingError, match="none of torch's"):
        normprobe.AdaptiveClipping("adam", model, torch.randn(2, 4))  # type: ignore[arg-type]
    other = torch.optim.SGD(nn.Linear(4, 4).parameters(), lr=1.0)
    with pytest.raises(SettingError, match="steps no parameter of the model"):
        normprobe.AdaptiveClipping(other, model, torch.randn(2, 4))


def test_a_table_with_sparse_gradients_is_clipped_row_by_row() -> None:
    rows, outcome = torch.tensor([[1, 3, 3, 5]]), {}
    for sparse in (True, False):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Embedding(8, 4, sparse=sparse), nn.LayerNorm(4), nn.Linear(4, 4))
        optimiser = torch.optim.SGD(model.parameters(), lr=1.0)
        normprobe.AdaptiveClipping(optimiser, model, rows, clipping=1e-3)
        (1e3 * loss(model, rows)).backward()
        gradient = model[0].weight.grad.to_dense().clone()
        optimiser.step()
        outcome[sparse] = model[0].weight.grad.to_dense()
        assert torch.equal(model[0].weight.grad.to_dense()[0], torch.zeros(4))
        assert not torch.allclose(gradient, outcome[sparse])
    assert torch.allclose(outcome[True], outcome[False])


class Stacks(nn.Module):
    """Layers whose weights, biases and gains one parameter each holds, on tokens with added positions."""

    def __init__(self, layers: int = 3, width: int = 16) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Embedding(8, width)
        self.places = nn.Parameter(torch.randn(1, 5, width))
        self.looked_up = nn.Parameter(torch.randn(5, width))
        self.gains = nn.Parameter(torch.ones(layers, width))
        self.up = nn.Parameter(0.1 * torch.randn(layers, 2 * width, width))
        self.up_bias = nn.Parameter(torch.full((layers, 2 * width), 0.1))
        self.down = nn.Parameter(0.1 * torch.randn(layers, width, 2 * width))
        self.low, self.high = nn.Parameter(torch.randn(8, 2)), nn.Parameter(torch.randn(2, width))
        self.sum = nn.Parameter(torch.randn(8, width))
        self.several = nn.Parameter(torch.zeros(4, 8))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.table(ids) + self.places + self.looked_up[torch.arange(5)]
        for layer, gain in enumerate(self.gains):
            h = nn.functional.rms_norm(x, (16,), gain)
            h = torch.relu(nn.functional.linear(h, self.up[layer], self.up_bias[layer]))
            x = x + nn.functional.linear(h, self.down[layer])
        logits = nn.functional.linear(x, self.sum + self.low @ self.high)  # a weight and what adapts it
        return logits[..., None, :] + self.several


def test_what_is_only_added_is_no_weight_whatever_its_shape() -> None:
    decayed, spared = normprobe.decay_groups(Stacks(), 0.1, torch.randint(0, 8, (2, 5)))
    assert set(spared["names"]) == {"places", "gains", "up_bias", "several"}
    assert set(decayed["names"]) == {"table.weight", "looked_up", "up", "down", "low", "high", "sum"}


def test_each_layer_of_a_stack_is_clipped_for_itself() -> None:
    model, x = Stacks(), torch.randint(0, 8, (2, 5))
    clip = normprobe.AdaptiveClipping(torch.optim.SGD(model.parameters(), lr=1.0), model, x)
    axes = {name: clip._axes.get(parameter) for name, parameter in model.named_parameters()}
    assert (axes["gains"], axes["up_bias"]) == ((1,), (1,))
    assert (axes["places"], axes["several"]) == ((0, 1, 2), (0, 1))
