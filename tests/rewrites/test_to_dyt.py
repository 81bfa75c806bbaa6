"""Norms that become Dynamic Tanh: the tanh that is nearest, by closed forms, and what it does to models."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

import normprobe
from normprobe.errors import RewriteError
from normprobe.norms import reference
from normprobe.rewrites import Plan, Survey, ToDyT
from normprobe.rewrites.norms.dyt_fit import SHIFT_ROWS, SLACK, nearest
from tests import models
from tests.rewrites.cases import applied, outputs, snapshot

ONE = torch.ones(1, dtype=torch.float64)
BUILDS = {
    "gpt2": models.gpt2,
    "llama": models.llama,
    "t5": models.t5,
    "bert": models.bert,
    "neox": lambda: models.neox(True),
    "torch": lambda: models.torch_encoder(True, True),
}


class Block(nn.Module):
    """x + W norm(x)."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.read = nn.RMSNorm(64), nn.Linear(64, 64)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = x + self.read(self.norm(x))
        return found


def rows(count: int, width: int = 8) -> Tensor:
    return torch.randn(count, width, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


def left(x: Tensor, y: Tensor, alpha: float) -> float:
    """Share of y about its row mean that the nearest multiple of tanh(alpha · x) about its own does not explain."""
    t = torch.tanh(alpha * x)
    t, about = (t - t.mean(0)).flatten(), (y - y.mean(0)).flatten()
    scale = torch.linalg.lstsq(t[:, None], about[:, None]).solution
    return float((about - t * scale[0]).square().sum() / about.square().sum())


# ---- the fit


@pytest.mark.parametrize("count", [200, SHIFT_ROWS - 1])
def test_a_tanh_is_found_again(count: int) -> None:
    x, gain = 2 * rows(count), 0.5 + rows(1)[0].abs()
    shift = rows(2)[1] * (count >= SHIFT_ROWS)
    found = nearest(x, 3 * gain * torch.tanh(0.7 * x) + shift, gain)
    assert (found.alpha, found.scale) == pytest.approx((0.7, 3.0), rel=1e-6)
    torch.testing.assert_close(found.shift, shift, rtol=1e-6, atol=1e-6)
    assert abs(found.unexplained) < 1e-9


@pytest.mark.parametrize("size", [1e-3, 1.0, 1e3])
def test_where_the_norm_is_a_line_the_tanh_still_bends(size: float) -> None:
    """Of unit normal z, tanh(a z) leaves 2 a⁴ / 3 of a line, to the leading order."""
    x = size * rows(4000)
    found = nearest(x, 2 * x / size, ONE)
    assert found.alpha * size == pytest.approx((1.5 * SLACK) ** 0.25, rel=0.4)
    assert found.unexplained == pytest.approx(left(x, x, found.alpha), abs=1e-12)
    assert left(x, x, found.alpha) <= SLACK < left(x, x, 1.13 * found.alpha)


def test_alpha_is_raised_to_no_more_than_1_over_the_size_of_the_inputs() -> None:
    """Of inputs near ±4 every tanh is as near to a line as the slack asks, steps too."""
    x = 4 * rows(300).sign() * (1 + 0.02 * rows(301)[1:])
    assert left(x, x, 100.0) < SLACK
    assert nearest(x, x, ONE).alpha * float(x.square().mean().sqrt()) == pytest.approx(1.0)


def test_a_shift_makes_up_for_the_mean_that_a_norm_subtracts() -> None:
    x = 5 + 3 * rows(1, 64) + 0.3 * rows(201, 64)[1:]
    y = reference.layernorm(x, 1e-5)
    found = nearest(x, y, ONE)
    fitted = found.scale * torch.tanh(found.alpha * x) + found.shift
    about = (y - y.mean(0)).square().sum()
    assert float((y - fitted).square().sum() / about) == pytest.approx(found.unexplained, rel=1e-9)
    assert found.unexplained < 0.15
    few = nearest(x[: SHIFT_ROWS - 1], y[: SHIFT_ROWS - 1], ONE)
    assert not few.shift.any()
    assert few.unexplained > 0.5


def test_what_cannot_be_fitted_is_nan() -> None:
    x = rows(50)
    for inputs, wanted in ((x * 0, x), (x, x * 0), (x * math.inf, x), (x, x * math.nan), (x, torch.ones_like(x))):
        assert math.isnan(nearest(inputs, wanted, ONE).alpha)


# ---- models


@pytest.mark.parametrize("name", BUILDS)
def test_norms_become_dynamic_tanh_and_back(name: str) -> None:
    model, inputs = BUILDS[name]()
    before, kept = outputs(model, inputs), snapshot(model)
    unit = applied(model, inputs, ToDyT("unit"))
    off = float((outputs(model, inputs) - before).norm())
    unit.undo()
    plan = applied(model, inputs, ToDyT())
    kinds = {norm.kind for norm in Survey.of(model, inputs).anatomy.norms if norm.role in ("pre", "post", "final")}
    assert kinds == {"dyt"}
    assert float((outputs(model, inputs) - before).norm()) < off
    plan.undo()
    assert snapshot(model) == kept


@pytest.mark.parametrize("before", [True, False])
def test_a_stream_with_a_mean_gets_tanhs_that_bend(before: bool) -> None:
    """What LayerNorm subtracts is most of such a stream: without a shift no tanh comes near what is left."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(1)
    heads = {"hidden_size": 32, "num_attention_heads": 4, "ffn_dim": 48, "word_embed_proj_dim": 32}
    config = transformers.OPTConfig(vocab_size=128, num_hidden_layers=3, do_layer_norm_before=before, **heads)
    model = transformers.OPTForCausalLM(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter) + (0.3 if parameter.dim() == 1 else 0.02))
    inputs = {"input_ids": torch.arange(32).reshape(2, 16) * 3}
    proof = applied(model, inputs, ToDyT()).proof
    assert proof is not None
    assert proof.kl is not None
    assert proof.kl < 0.04  # 0.09 without a shift, as where every next token is as likely
    report = normprobe.probe(model, inputs)
    assert [one.message for one in report.findings if one.code == "NP802"] == []
    assert {norm.kind for norm in report.anatomy.norms} == {"dyt"}


def test_what_is_fitted_is_as_near_as_the_slack_lets_it() -> None:
    torch.manual_seed(0)
    stack, x = nn.Sequential(Block(), nn.LayerNorm(64)), torch.randn(64, 64)
    applied(stack, x, ToDyT(only="0.norm"))
    norm, z = stack[0].norm, reference.rmsnorm(x.double(), torch.finfo(torch.float32).eps)
    alpha, scale = norm.alpha.item(), norm.weight[0].item()
    fitted = scale * torch.tanh(alpha * x.double()) + norm.dyt_offset.detach().double()
    off = float((z - fitted).square().sum() / (z - z.mean(0)).square().sum())
    assert off == pytest.approx(left(x.double(), z, alpha), rel=1e-4)
    best = min(left(x.double(), z, alpha * 1.02**power) for power in range(-200, 1))
    assert best < off <= best + SLACK + 1e-6


@pytest.mark.parametrize(
    ("made", "wanted"),
    [
        (lambda: nn.LayerNorm(models.WIDTH, elementwise_affine=False), {"alpha", "dyt_gain", "dyt_offset"}),
        (lambda: nn.LayerNorm(models.WIDTH, bias=False), {"alpha", "dyt_offset"}),
        (lambda: nn.LayerNorm(models.WIDTH), {"alpha"}),
        (lambda: nn.RMSNorm(models.WIDTH), {"alpha", "dyt_offset"}),
    ],
)
def test_a_norm_gets_the_gain_and_the_offset_that_it_lacks(made: object, wanted: set[str]) -> None:
    torch.manual_seed(0)
    built = models.decoder("pre", norm=made, layers=2)
    kept = snapshot(built[0])
    plan: Plan = applied(*built, ToDyT())
    assert {name.rpartition(".")[2] for site in plan.steps[0][1].sites for name in site.added} == wanted
    plan.undo()
    assert snapshot(built[0]) == kept


def test_inputs_without_a_signal_are_refused() -> None:
    stack = nn.Sequential(Block(), nn.LayerNorm(64))
    kept = snapshot(stack)
    with pytest.raises(RewriteError, match="ToDyT cannot fit 0") as raised:
        applied(stack, torch.zeros(20, 64), ToDyT())
    assert "inputs with a signal" in str(raised.value)
    assert snapshot(stack) == kept
