"""Batch norms frozen, synchronised, folded, replaced: what is computed in eval and in train mode, and the way back."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from normprobe.errors import RewriteError
from normprobe.rewrites import (
    Effect,
    FoldBatchNorm,
    FreezeBatchNorm,
    Survey,
    ToGroupNorm,
    ToSyncBatchNorm,
)
from tests.rewrites.cases import applied, outputs, snapshot


class Block(nn.Module):
    """x + bn(conv(relu(bn(conv(x))))), as residual networks have it."""

    def __init__(self, channels: int, bias: bool) -> None:
        super().__init__()
        self.first = nn.Conv2d(channels, channels, 3, padding=1, bias=bias)
        self.norm1 = nn.BatchNorm2d(channels)
        self.second = nn.Conv2d(channels, channels, 3, padding=1, groups=2, bias=bias)
        self.norm2 = nn.BatchNorm2d(channels)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = x + self.norm2(self.second(torch.relu(self.norm1(self.first(x)))))
        return found


def net(bias: bool = False) -> tuple[nn.Module, Tensor]:
    """Blocks whose statistics, gains and offsets are those of some data, and are not trivial."""
    torch.manual_seed(0)
    stem = [nn.ConvTranspose2d(3, 8, 2), nn.BatchNorm2d(8)]
    model = nn.Sequential(*stem, Block(8, bias), Block(8, bias), nn.Flatten(), nn.Linear(8 * 81, 5))
    with torch.no_grad():
        for norm in (m for m in model.modules() if isinstance(m, nn.BatchNorm2d)):
            norm.weight.normal_(1, 0.3)
            norm.bias.normal_(0, 0.3)
        for _ in range(40):
            model(2 * torch.randn(16, 3, 8, 8) + 1)
    return model.eval(), 2 * torch.randn(4, 3, 8, 8) + 1


def test_frozen_norms_are_the_same_bit_for_bit_and_stay_so_in_train_mode() -> None:
    model, x = net()
    before, kept = outputs(model, x), snapshot(model)
    plan = applied(model, x, FreezeBatchNorm(expect=5))
    assert "in train mode the function changes" in str(plan)
    assert torch.equal(outputs(model, x), before)
    statistics = {name: buffer.clone() for name, buffer in model.named_buffers()}
    model.train()
    assert torch.equal(outputs(model, x), before)
    assert all(torch.equal(buffer, statistics[name]) for name, buffer in model.named_buffers())
    assert all(module.training for module in model.modules())
    model(x).square().mean().backward()
    assert model[1].weight.grad is not None
    twin = copy.deepcopy(model)
    assert torch.equal(outputs(twin, x), before)
    model.zero_grad(set_to_none=True)
    model.eval()
    plan.undo()
    assert snapshot(model) == kept


@pytest.mark.parametrize("bias", [False, True])
def test_folded_norms_compute_the_same(bias: bool) -> None:
    model, x = net(bias)
    before, kept = outputs(model.double(), x.double()), None
    kept = snapshot(model)
    plan = applied(model, x.double(), FoldBatchNorm(expect=5))
    assert plan.effect is Effect.EXACT
    assert float((outputs(model, x.double()) - before).abs().max() / before.abs().max()) <= 1e-12
    assert not any(isinstance(module, nn.BatchNorm2d) for module in model.modules())
    assert not any(norm.kind == "batchnorm" for norm in Survey.of(model, x.double()).anatomy.norms)
    plan.undo()
    assert snapshot(model) == kept


def test_what_is_read_elsewhere_too_is_not_folded() -> None:
    class Tapped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.read, self.norm = nn.Linear(4, 6), nn.BatchNorm1d(6)

        def forward(self, x: Tensor) -> Tensor:
            h = self.read(x)
            found: Tensor = self.norm(h) + h
            return found

    with pytest.raises(RewriteError, match="something else reads what it reads"):
        applied(Tapped().eval(), torch.randn(5, 4), FoldBatchNorm())
    activated = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.BatchNorm1d(6)).eval()
    with pytest.raises(RewriteError, match="does not come straight from"):
        applied(activated, torch.randn(5, 4), FoldBatchNorm())


def test_group_norms_take_gain_and_offset_over_in_expectation() -> None:
    """Where every channel of every sample has just the stored statistics, both norms give the same."""
    torch.manual_seed(0)
    norm = nn.BatchNorm2d(8).double().eval()
    with torch.no_grad():
        norm.running_mean.normal_(0, 2)
        norm.running_var.uniform_(0.5, 4)
        norm.weight.normal_(1, 0.3)
        norm.bias.normal_(0, 0.3)
    z = torch.randn(3, 8, 16, 16, dtype=torch.float64)
    z = (z - z.mean((2, 3), keepdim=True)) / z.std((2, 3), keepdim=True, unbiased=False)
    x = z * norm.running_var.sqrt()[:, None, None] + norm.running_mean[:, None, None]
    before = outputs(norm, x)
    model = nn.Sequential(norm, nn.Conv2d(8, 4, 1).double())
    applied(model, x, ToGroupNorm(groups=2))
    assert torch.allclose(outputs(model[0], x), before, atol=1e-9)
    assert list(model[0].state_dict()) == ["weight", "bias"]


def test_group_norms_are_near_on_data_and_do_not_see_the_batch() -> None:
    model, x = net()
    before, kept = outputs(model, x), snapshot(model)
    plan = applied(model, x, ToGroupNorm())
    assert plan.effect is Effect.CALIBRATED
    after = outputs(model, x)
    assert float((after - before).norm() / before.norm()) < 0.5
    kinds = {norm.kind for norm in Survey.of(model, x).anatomy.norms}
    assert kinds <= {"groupnorm", "layernorm", "instancenorm"}
    model.train()
    assert torch.allclose(outputs(model, x[:1]), after[:1], atol=1e-5)
    model.eval()
    plan.undo()
    assert snapshot(model) == kept


def test_a_norm_without_gain_gets_one_and_uneven_groups_are_refused() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 6, 1), nn.BatchNorm2d(6, affine=False), nn.ReLU()).eval()
    x = torch.randn(2, 3, 4, 4)
    with pytest.raises(RewriteError, match="do not make 4 equal groups"):
        applied(model, x, ToGroupNorm(4))
    plan = applied(model, x, ToGroupNorm())
    assert {"1.group_gain", "1.group_offset"} == set(plan.steps[0][1].sites[0].added)
    plan.undo()
    assert list(dict(model[1].named_parameters())) == []


def test_synchronised_norms_are_the_same_objects_of_another_class() -> None:
    model, x = net()
    norm, before, kept = model[1], outputs(model, x), snapshot(model)
    plan = applied(model, x, ToSyncBatchNorm(expect=5))
    assert model[1] is norm
    assert isinstance(norm, nn.SyncBatchNorm)
    assert torch.equal(outputs(model, x), before)
    with pytest.raises(RewriteError, match="would change nothing"):
        applied(model, x, ToSyncBatchNorm())
    plan.undo()
    assert snapshot(model) == kept
