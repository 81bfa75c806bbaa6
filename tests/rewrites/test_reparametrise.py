"""Weight norm and weight standardisation added and taken away: the same weights, both ways, bit for bit back."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations

from normprobe.errors import RewriteError
from normprobe.rewrites import Effect, PlainWeights, Reparametrise, Survey, make_plan
from tests import models
from tests.rewrites.cases import applied, outputs, snapshot


@pytest.mark.parametrize("build", [models.gpt2, models.llama])
def test_weight_norm_keeps_the_function_and_goes_again(build: Any) -> None:
    model, inputs = build()
    before, kept = outputs(model, inputs), snapshot(model)
    plan = applied(model, inputs, Reparametrise())
    assert plan.effect is Effect.EXACT
    assert torch.allclose(outputs(model, inputs), before, atol=1e-5)
    kinds = {each.kind for each in Survey.of(model, inputs).anatomy.reparametrizations}
    assert kinds == {"weight_norm"}
    away = applied(model, inputs, PlainWeights())
    assert not Survey.of(model, inputs).anatomy.reparametrizations
    assert torch.allclose(outputs(model, inputs), before, atol=1e-5)
    away.undo()
    assert {each.kind for each in Survey.of(model, inputs).anatomy.reparametrizations} == {"weight_norm"}
    plan.undo()
    assert snapshot(model) == kept


def test_there_is_one_length_for_each_output_also_where_a_weight_is_stored_the_other_way_round() -> None:
    model, inputs = models.gpt2()
    matrix = model.transformer.h[0].mlp.c_fc.weight.detach().clone()
    applied(model, inputs, Reparametrise(only="*mlp.c_fc.weight", expect=2))
    lengths = model.transformer.h[0].mlp.c_fc.parametrizations.weight.original0
    assert lengths.shape == (1, matrix.shape[1])
    assert torch.allclose(lengths, matrix.norm(dim=0, keepdim=True), rtol=1e-5)


def test_standardised_weights_have_no_mean_and_the_length_that_they_had() -> None:
    model, inputs = models.llama()
    matrix = model.model.layers[0].mlp.up_proj.weight.detach().clone()
    plan = applied(model, inputs, Reparametrise("weight_standardization", eps=1e-12))
    assert plan.effect is Effect.BREAKING
    wanted = matrix - matrix.mean(1, keepdim=True)
    assert torch.allclose(model.model.layers[0].mlp.up_proj.weight, wanted, atol=1e-6)
    assert {each.kind for each in Survey.of(model, inputs).anatomy.reparametrizations} == {"weight_standardization"}
    twin = copy.deepcopy(model)
    twin.load_state_dict(model.state_dict())
    assert torch.equal(outputs(twin, inputs), outputs(model, inputs))


def test_torchs_own_parametrisations_go() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8)).eval()
    parametrizations.weight_norm(model[0])
    parametrizations.spectral_norm(model[2])
    x = torch.randn(3, 8)
    before, kept = outputs(model, x), snapshot(model)
    plan = applied(model, x, PlainWeights(expect=2))
    assert sorted(dict(model.named_parameters())) == ["0.bias", "0.weight", "2.bias", "2.weight"]
    assert torch.allclose(outputs(model, x), before, atol=1e-6)
    plan.undo()
    assert snapshot(model) == kept
    assert torch.equal(outputs(model, x), before)


class Own(nn.Module):
    """Computes its weight in its own forward."""

    def __init__(self) -> None:
        super().__init__()
        self.g, self.v = nn.Parameter(torch.ones(8, 1)), nn.Parameter(torch.randn(8, 8))

    def forward(self, x: Tensor) -> Tensor:
        return x @ (self.g * self.v / self.v.norm(dim=1, keepdim=True)).T


def test_what_cannot_be_told_apart_or_is_shared_is_refused() -> None:
    model = nn.Sequential(Own(), nn.ReLU(), nn.Linear(8, 8))
    with pytest.raises(RewriteError, match="its own forward"):
        applied(model, torch.randn(3, 8), PlainWeights())
    tied, x = shared()
    with pytest.raises(RewriteError, match="it is shared"):
        applied(tied, x, Reparametrise(only="*"))
    with pytest.raises(RewriteError, match="kind: weight_norm"):
        Reparametrise("half")  # type: ignore[arg-type]


def shared() -> models.Built:
    class Shared(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)
            self.b.weight = self.a.weight

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.b(torch.relu(self.a(x)))
            return out

    return Shared(), torch.randn(3, 8)


class Experts(nn.Module):
    """Three experts of one linear map each, weighted by a router, added to the input."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(models.WIDTH, 3)
        self.up = nn.Parameter(torch.randn(3, 2 * models.WIDTH, models.WIDTH) / 6)
        self.down = nn.Parameter(torch.randn(3, models.WIDTH, 2 * models.WIDTH) / 8)

    def forward(self, x: Tensor) -> Tensor:
        share = self.router(x).softmax(-1)
        rows = x.flatten(0, 1).expand(3, -1, -1)
        made = torch.bmm(torch.bmm(rows, self.up.mT).relu(), self.down.mT).unflatten(1, x.shape[:2])
        out: Tensor = x + (made * share.movedim(-1, 0).unsqueeze(-1)).sum(0)
        return out


def test_there_is_one_length_for_each_output_of_each_expert() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(Experts(), Experts(), nn.Linear(models.WIDTH, 5)).eval()
    x = torch.randn(2, 6, models.WIDTH)
    plan = applied(model, x, Reparametrise())
    assert model[0].parametrizations.up.original0.shape == (3, 2 * models.WIDTH, 1)
    found = Survey.of(model, x).anatomy.reparametrizations
    assert {(each.kind, each.axes) for each in found if each.parameter.startswith("0.parametrizations.up")} == {
        ("weight_norm", (2,))
    }
    assert plan.proof is not None
    assert plan.proof.holds


def test_weight_norm_of_an_output_without_weights_is_refused_and_standardisation_is_not() -> None:
    model, inputs = models.llama()
    name = "model.layers.0.mlp.up_proj.weight"
    model.get_parameter(name).data[3] = 0
    (refused,) = make_plan(model, [Reparametrise()], inputs).steps[0][1].refused
    assert (refused.path, "no direction" in refused.why) == (name, True)
    applied(model, inputs, Reparametrise("weight_standardization", only=name, expect=1))
    assert bool(outputs(model, inputs).isfinite().all())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weight_norm_starts_with_the_very_weights(dtype: torch.dtype) -> None:
    model, inputs = models.llama()
    model.to(dtype)
    held = model.model.layers[0].mlp.up_proj.weight.detach().clone()
    applied(model, inputs, Reparametrise())
    assert torch.equal(model.model.layers[0].mlp.up_proj.weight, held)


def test_weights_that_einsum_takes_are_refused_in_the_plan() -> None:
    class Heads(nn.Module):
        """x + Σ_h tanh(norm(x) W_h) V_h."""

        def __init__(self) -> None:
            super().__init__()
            self.norm, self.read = nn.LayerNorm(16), nn.Parameter(torch.randn(4, 16, 8))
            self.write = nn.Parameter(torch.randn(4, 8, 16))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            inner = torch.einsum("btd,hdk->bthk", self.norm(x), self.read).tanh()
            return x + torch.einsum("bthk,hkd->btd", inner, self.write)

    plan = make_plan(nn.Sequential(Heads(), Heads()), [Reparametrise()], torch.randn(2, 5, 16))
    found = plan.steps[0][1]
    assert found.sites == ()
    assert [each.path for each in found.refused] == [f"{i}.{name}" for i in (0, 1) for name in ("read", "write")]
    assert "as einsum takes it" in found.refused[0].why
