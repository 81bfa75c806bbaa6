"""What stands where a module was: it passes its input on, tells dtype and device, and is in no state dict."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from normprobe.errors import RewriteError
from normprobe.rewrites import Fixup, Survey, ToPostNorm, make_plan
from normprobe.rewrites.stand_in import take_out
from normprobe.rewrites.way_back import Structure
from tests import models
from tests.rewrites.cases import snapshot


def test_it_tells_the_dtype_that_the_model_has() -> None:
    model, x = nn.Sequential(nn.LayerNorm(4), nn.Linear(4, 4)), torch.randn(2, 4)
    kept = snapshot(model)
    before = Structure(model)
    old = take_out(model, "0")
    assert isinstance(old, nn.LayerNorm)
    assert torch.equal(model[0](x), x)
    assert list(model.state_dict()) == ["1.weight", "1.bias"]
    assert model.to(torch.bfloat16)[0].weight.dtype is torch.bfloat16
    model.float()
    with pytest.raises(RewriteError, match="cannot be taken out"):
        take_out(model, "7")
    before.put_back()
    assert list(snapshot(model)) == list(kept)
    assert model[0] is old


class Casts(nn.Module):
    """Casts to the dtype of its norm's weight, as state space models do."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.read = nn.RMSNorm(models.WIDTH), nn.Linear(models.WIDTH, models.WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = x + self.read(self.norm(x.to(self.norm.weight.dtype)))
        return found


class Gated(nn.Module):
    """An RMSNorm that multiplies by a gate that it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(models.WIDTH))

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        x = x * torch.sigmoid(gate)
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * self.weight


class Inner(Casts):
    """With a gated norm before the weights that write."""

    def __init__(self) -> None:
        super().__init__()
        self.gated, self.write = Gated(), nn.Linear(models.WIDTH, models.WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        h = self.read(self.norm(x))
        found: Tensor = x + self.write(self.gated(h, h))
        return found


def stack(block: Any) -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(*(block() for _ in range(3)), nn.RMSNorm(models.WIDTH), nn.Linear(models.WIDTH, 5))
    return models.shuffled(model), torch.randn(2, 6, models.WIDTH)


@pytest.mark.parametrize("rewrite", [Fixup(), ToPostNorm()])
def test_norms_whose_weight_is_asked_for_its_dtype_go(rewrite: Any) -> None:
    model, x = stack(Casts)
    kept = snapshot(model)
    plan = make_plan(model, [rewrite], x).apply()
    assert model.to(torch.bfloat16)(x.bfloat16()).dtype is torch.bfloat16
    model.float()
    plan.undo()
    assert len(kept) == len(snapshot(model))


def test_a_norm_with_a_gate_stays_and_its_neighbours_go() -> None:
    model, x = stack(Inner)
    plan = make_plan(model, [Fixup()], x)
    assert {each.path for each in plan.steps[0][1].refused if "more than one tensor" in each.why} == {
        f"{i}.gated" for i in range(3)
    }
    plan.apply()
    assert {norm.path for norm in Survey.of(model, x).anatomy.norms if norm.kind == "rmsnorm"} == {
        f"{i}.gated" for i in range(3)
    }
