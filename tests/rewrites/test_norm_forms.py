"""Eps set and moved, norms fused, gains stored another way: what is computed, what is refused, and the way back."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from normprobe.errors import RewriteError
from normprobe.norms import reference
from normprobe.records import NormSite
from normprobe.rewrites import Effect, FuseNorms, SetEps, StoreGains, Survey, make_plan
from tests import models
from tests.norms import zoo
from tests.rewrites.cases import applied, snapshot

BUILDS = {
    "gpt2": models.gpt2,
    "llama": models.llama,
    "gemma2": models.gemma2,
    "t5": models.t5,
    "bloom": models.bloom,
    "torch": lambda: models.torch_encoder(True, True),
}


class Block(nn.Module):
    """x + read(norm(x)), twice, and a norm."""

    def __init__(self, norm: Any) -> None:
        super().__init__()
        self.norms = nn.ModuleList(norm() for _ in range(3))
        self.reads = nn.ModuleList(nn.Linear(models.WIDTH, models.WIDTH) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for norm, read in zip(self.norms, self.reads, strict=False):
            x = x + read(norm(x))
        out: Tensor = self.norms[2](x)
        return out


def blocks(**options: Any) -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    return models.shuffled(Block(lambda: zoo.RMSNorm(**options))), torch.randn(2, 5, models.WIDTH)


def norms(model: nn.Module, inputs: Any) -> list[NormSite]:
    return [norm for norm in Survey.of(model, inputs).anatomy.norms if norm.executed]


# ---- SetEps


@pytest.mark.parametrize("name", BUILDS)
def test_every_norm_has_the_eps_that_was_set_and_undo_is_bit_for_bit(name: str) -> None:
    model, inputs = BUILDS[name]()
    kept = snapshot(model)
    plan = applied(model, inputs, SetEps(3e-3))
    found = norms(model, inputs)
    assert found
    assert {norm.eps_placement for norm in found} == {"inside_sqrt"}
    assert all(norm.eps == pytest.approx(3e-3, rel=1e-3) for norm in found)
    plan.undo()
    assert snapshot(model) == kept


@pytest.mark.parametrize("placement", ["outside_sqrt", "clamp", "none"])
def test_eps_moves_inside_the_root(placement: str) -> None:
    model, x = blocks(eps=1e-2, placement=placement) if placement != "none" else blocks(eps=0.0)
    eps = 1e-2 if placement != "none" else 2e-3
    gain = model.norms[0].weight.detach()
    applied(model, x, SetEps(None if placement != "none" else eps))
    small = 0.05 * torch.randn(3, models.WIDTH)
    wanted = reference.rmsnorm(small.double(), eps) * gain.double()
    assert torch.allclose(model.norms[0](small).double(), wanted, atol=1e-6)


def test_the_module_keeps_its_class_where_one_number_decides() -> None:
    model, inputs = models.llama()
    before = [type(module) for module in model.modules()]
    plan = make_plan(model, [SetEps(1e-3, only="*input_layernorm")], inputs)
    assert "its variance_epsilon" in str(plan)
    plan.apply()
    assert [type(module) for module in model.modules()] == before
    changed = [norm.path for norm in norms(model, inputs) if norm.eps == pytest.approx(1e-3, rel=1e-3)]
    assert changed == ["model.layers.0.input_layernorm", "model.layers.1.input_layernorm"]


def test_two_numbers_of_one_value_are_told_apart() -> None:
    class Two(zoo.RMSNorm):
        def __init__(self) -> None:
            super().__init__(eps=1e-4)
            self.momentum = 1e-4

    torch.manual_seed(0)
    model, x = models.shuffled(Block(Two)), torch.randn(2, 5, models.WIDTH)
    applied(model, x, SetEps(1e-2))
    assert model.norms[0].momentum == 1e-4
    assert all(norm.eps == pytest.approx(1e-2, rel=1e-3) for norm in norms(model, x))


def test_moving_eps_is_calibrated_and_setting_it_is_breaking() -> None:
    assert SetEps().effect is Effect.CALIBRATED
    assert SetEps(1e-5).effect is Effect.BREAKING
    with pytest.raises(RewriteError, match="0 <= eps < 1"):
        SetEps(2.0)
    model, inputs = models.llama()
    with pytest.raises(RewriteError, match="would change nothing"):
        applied(model, inputs, SetEps())


# ---- FuseNorms


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("multiply", ["after_cast", "before_cast"])
@pytest.mark.parametrize("one_plus", [False, True])
def test_a_written_norm_is_fused_bit_for_bit_near(dtype: torch.dtype, multiply: str, one_plus: bool) -> None:
    model, x = blocks(multiply=multiply, one_plus=one_plus)
    model, x = model.to(dtype), x.to(dtype)
    with torch.no_grad():
        before = model(x)
    plan = applied(model, x, FuseNorms(expect=3))
    with torch.no_grad():
        after = model(x)
    assert plan.proof is not None
    assert plan.proof.holds
    step = torch.finfo(dtype).eps
    assert float((after - before).abs().max()) <= 2 * step * float(before.abs().max())
    assert [norm.weight_multiply for norm in norms(model, x)] == [
        "after_cast" if multiply == "after_cast" else multiply
    ] * 3


def test_a_layernorm_by_hand_becomes_one_kernel() -> None:
    def by_hand(self: Any, x: Tensor) -> Tensor:
        centred = x - x.mean(-1, keepdim=True)
        return centred * torch.rsqrt(centred.square().mean(-1, keepdim=True) + 1e-5) * self.weight + self.bias

    width = models.WIDTH
    torch.manual_seed(0)
    make = lambda: zoo.Rule(by_hand, weight=torch.ones(width), bias=torch.zeros(width))  # noqa: E731
    model, x = models.shuffled(Block(make)), torch.randn(2, 5, width)
    assert not any(norm.fused for norm in norms(model, x))
    applied(model, x, FuseNorms())
    assert [(norm.kind, norm.fused) for norm in norms(model, x)] == [("layernorm", True)] * 3


def test_a_half_precision_reduction_is_not_the_same_and_refused() -> None:
    model, x = blocks(upcast=False)
    with pytest.raises(RewriteError, match="UpcastNorms"):
        applied(model.bfloat16(), x.bfloat16(), FuseNorms())
    outside, y = blocks(placement="outside_sqrt", eps=1e-3)
    with pytest.raises(RewriteError, match="not inside the root"):
        applied(outside, y, FuseNorms())


# ---- StoreGains


@pytest.mark.parametrize(("name", "stored"), [("gemma2", "weight"), ("llama", "one_plus_weight")])
def test_gains_are_stored_the_other_way_and_back(name: str, stored: Any) -> None:
    model, inputs = BUILDS[name]()
    old = {key: value.detach().clone() for key, value in model.named_parameters()}
    plan = applied(model, inputs, StoreGains(stored))
    found = norms(model, inputs)
    assert {norm.affine for norm in found} == {stored}
    moved = {norm.weight for norm in found}
    for key, value in model.named_parameters():
        shift = (1.0 if stored == "weight" else -1.0) if key in moved else 0.0
        assert torch.equal(value, old[key] + shift)
    assert plan.proof is not None
    assert plan.proof.max_rel <= 1e-6
    applied(model, inputs, StoreGains("weight" if stored != "weight" else "one_plus_weight"))
    assert {norm.affine for norm in norms(model, inputs)}.isdisjoint({stored})
    twin = pickle.loads(pickle.dumps(copy.deepcopy(model)))
    assert {norm.affine for norm in norms(twin, inputs)} == {norm.affine for norm in norms(model, inputs)}


def test_a_gain_of_two_norms_moves_once() -> None:
    model, x = blocks()
    for norm in model.norms:
        norm.weight = model.norms[0].weight
    old = model.norms[0].weight.detach().clone()
    applied(model, x, StoreGains("one_plus_weight", expect=3))
    assert torch.equal(model.norms[0].weight, old - 1)


def test_an_offset_that_is_forgotten_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """What holds these tests up: a gain that does not move as the form says cannot be proven."""
    monkeypatch.setattr("normprobe.rewrites.norms.gain_form.set_values", lambda *args: None)
    model, inputs = models.gemma2()
    kept = snapshot(model)
    with pytest.raises(RewriteError, match="could not prove StoreGains"):
        applied(model, inputs, StoreGains())
    assert snapshot(model) == kept


def test_an_eps_of_more_digits_than_can_be_recovered_is_taken_from_the_operation() -> None:
    """1.5625e-7, as GLM-4 has it, reads as 1.562e-7; of small inputs that is a change of 1e-4 in the output."""
    model, x = blocks(eps=1.5625e-7, upcast=False)
    model, x = model.double(), 1e-4 * x.double()
    assert norms(model, x)[0].eps != 1.5625e-7
    proof = applied(model, x, FuseNorms()).proof
    assert proof is not None
    assert proof.holds
    assert proof.max_rel < 1e-12


class OfHeads(nn.Module):
    """A norm that is called with heads apart."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(1 + 0.1 * torch.randn(4, models.WIDTH // 4))

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float() - x.float().mean(-1, keepdim=True)
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-5)
        return (self.weight.float() * wide).to(x.dtype)


class Apart(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.read = OfHeads(), nn.Linear(models.WIDTH, models.WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.read(self.norm(x.unflatten(-1, (4, -1))).flatten(-2))
        return out


def test_a_gain_for_each_head_and_feature_is_applied_behind_the_fused_operation() -> None:
    torch.manual_seed(0)
    model, x = Apart().eval(), torch.randn(2, 5, models.WIDTH)
    proof = applied(model, x, FuseNorms()).proof
    assert proof is not None
    assert proof.holds
    assert norms(model, x)[0].fused
