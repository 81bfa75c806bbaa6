"""Which parameters decay, and how far a step may reach: against float64 references, on storage of every kind."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import normprobe
from normprobe.errors import InputError, SettingError
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
    with pytest.raises(SettingError, match="the clipping cannot be used"):
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


@pytest.mark.parametrize("named", [False, True])
def test_gradients_that_a_closure_makes_are_clipped(named: bool) -> None:
    model, inputs = models.llama(tie_word_embeddings=False)
    matrix = model.model.layers[0].mlp.up_proj.weight
    optimiser = torch.optim.SGD(model.parameters(), lr=1.0)
    normprobe.AdaptiveClipping(optimiser, model, inputs, clipping=1e-3, eps=1e-2)
    made = []

    def closure() -> float:
        optimiser.zero_grad()
        value = 1e3 * loss(model, inputs)
        value.backward()
        made.append(matrix.grad.clone())
        return float(value.detach())

    before = matrix.detach().clone()
    value = optimiser.step(closure=closure) if named else optimiser.step(closure)
    assert value > 0
    assert len(made) == 1
    wanted = clipped(before, made[0], 0, 1e-3, 1e-2)
    assert not torch.allclose(wanted, made[0].double(), rtol=1e-3)
    assert torch.allclose((before - matrix).double(), wanted, atol=1e-6)


class Tasks(nn.Module):
    """Two bodies and two heads, of which one each runs."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.bodies, self.heads = nn.ModuleList(), nn.ModuleList()
        for _ in range(2):
            self.bodies.append(nn.Linear(8, 8))
            self.heads.append(nn.Linear(8, 20))
        self.task = 0

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.heads[self.task](self.norm(x + self.bodies[self.task](self.norm(x)).tanh()))
        return found


def steps_of(model: nn.Module, optimiser: torch.optim.Optimizer, inputs: Tensor) -> dict[str, tuple[Tensor, Tensor]]:
    """What each parameter moved by in one step, and the gradient that it had."""
    optimiser.zero_grad()
    (1e3 * loss(model, inputs)).backward()
    had = {n: (p.detach().clone(), p.grad.clone()) for n, p in model.named_parameters() if p.grad is not None}
    optimiser.step()
    return {name: (value - model.get_parameter(name).detach(), grad) for name, (value, grad) in had.items()}


def test_what_did_not_run_has_the_units_of_its_kind_and_the_head_keeps_its_bias() -> None:
    torch.manual_seed(0)
    model, x = Tasks(), torch.randn(2, 5, 8)
    optimiser = torch.optim.SGD(model.parameters(), lr=1.0)
    normprobe.AdaptiveClipping(optimiser, model, x, clipping=1e-3)
    for task in (0, 1):
        model.task = task
        before = model.bodies[task].weight.detach().clone()
        moved = steps_of(model, optimiser, x)
        step, gradient = moved[f"bodies.{task}.weight"]
        assert torch.allclose(step.double(), clipped(before, gradient, 0, 1e-3, 1e-3), atol=1e-6)
        step, gradient = moved[f"heads.{task}.weight"]
        assert torch.allclose(step, gradient, atol=1e-4)
    model.task = 0
    step, gradient = steps_of(model, optimiser, x)["heads.0.bias"]
    assert torch.allclose(step, gradient, atol=1e-4)


def test_what_joins_later_is_clipped_and_what_is_not_of_the_model_is_left() -> None:
    torch.manual_seed(0)
    model, x = Tasks(), torch.randn(2, 5, 8)
    optimiser = torch.optim.SGD(model.bodies.parameters(), lr=1.0)
    normprobe.AdaptiveClipping(optimiser, model, x, clipping=1e-3)
    model.extra, foreign = nn.Linear(8, 8), nn.Linear(8, 8)
    for module in (model.extra, foreign):
        optimiser.add_param_group({"params": list(module.parameters())})
        module.weight.grad = torch.full((8, 8), 5.0)
    before, other = model.extra.weight.detach().clone(), foreign.weight.detach().clone()
    optimiser.step()
    wanted = clipped(before, torch.full((8, 8), 5.0), 0, 1e-3, 1e-3)
    assert torch.allclose((before - model.extra.weight).double(), wanted, atol=1e-6)
    assert torch.allclose(other - foreign.weight, torch.full((8, 8), 5.0))


def test_an_optimiser_is_clipped_once_for_each_model() -> None:
    one, two, x = nn.Linear(4, 4), nn.Linear(4, 4), torch.randn(2, 4)
    optimiser = torch.optim.SGD([*one.parameters(), *two.parameters()], lr=1.0)
    first = normprobe.AdaptiveClipping(optimiser, one, x, head=True)
    normprobe.AdaptiveClipping(optimiser, two, x, head=True)
    with pytest.raises(SettingError, match="clipped already"):
        normprobe.AdaptiveClipping(optimiser, one, x, clipping=0.02, head=True)
    first.remove()
    first.remove()
    normprobe.AdaptiveClipping(optimiser, one, x, clipping=0.02, head=True)


# ---- numbers and inputs that cannot be


@pytest.mark.parametrize("wrong", ["a", None, True, -1.0, float("inf")])
def test_numbers_that_are_none_are_refused(wrong: Any) -> None:
    model, x = nn.Linear(4, 4), torch.randn(2, 4)
    optimiser = torch.optim.SGD(model.parameters(), lr=1.0)
    with pytest.raises(SettingError, match="the weight decay cannot be used"):
        normprobe.decay_groups(model, wrong, x)
    with pytest.raises(SettingError, match="the learning rate cannot be used"):
        normprobe.parameter_groups(model, wrong, inputs=x)
    with pytest.raises(SettingError, match="the clipping cannot be used"):
        normprobe.AdaptiveClipping(optimiser, model, x, clipping=wrong)
    with pytest.raises(SettingError, match="the eps cannot be used"):
        normprobe.AdaptiveClipping(optimiser, model, x, eps=wrong)


WRONG_INPUTS = [
    (torch.randn(2, 3), "the forward of Linear raised"),
    ({"x": torch.randn(2, 4)}, "the forward of Linear raised"),
    ("words", "a text was given"),
    (torch.randn(0, 4), "the inputs are empty"),
]


@pytest.mark.parametrize(("inputs", "said"), WRONG_INPUTS)
def test_inputs_that_do_not_fit_are_named(inputs: Any, said: str) -> None:
    model, base = nn.Linear(4, 4), nn.Linear(2, 4)
    optimiser = torch.optim.SGD(model.parameters(), lr=1.0)
    for call in (
        lambda: normprobe.decay_groups(model, 0.1, inputs),
        lambda: normprobe.AdaptiveClipping(optimiser, model, inputs),
        lambda: normprobe.parameter_groups(model, 0.1, base, inputs, torch.randn(2, 2)),
        lambda: normprobe.parameter_groups(model, 0.1, base, torch.randn(2, 4), inputs),
        lambda: normprobe.plan(model, normprobe.FoldGains(), inputs),
        lambda: normprobe.rewrite(model, normprobe.FoldGains(), inputs),
        lambda: normprobe.mend(model, inputs),
    ):
        with pytest.raises(InputError, match=said):
            call()


@pytest.mark.parametrize("name", ["adamw", "AdamW", "Adam", "SGD"])
def test_optimisers_are_named_in_any_case_and_adamw_is_adam(name: str) -> None:
    model, base = models.Mlp(32, 48), models.Mlp(16, 24)
    inputs, narrow = torch.randn(2, 5, 32), torch.randn(2, 5, 16)
    found = normprobe.parameter_groups(model, 1.0, base, inputs, narrow, optimizer=name)  # type: ignore[arg-type]
    known = normprobe.parameter_groups(model, 1.0, base, inputs, narrow, optimizer="sgd" if name == "SGD" else "adam")
    assert [group["lr"] for group in found] == [group["lr"] for group in known]
    with pytest.raises(SettingError, match="unknown optimizer"):
        normprobe.parameter_groups(model, 1.0, base, inputs, narrow, optimizer="lion")  # type: ignore[arg-type]
