"""Gains that two norms share: what would change both through one of them is refused."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from normprobe.rewrites import FoldGains, RemoveNorms, Rewrite, Sites, Survey, ToDyT, make_plan
from tests.models import WIDTH, shuffled

X = torch.randn(2, 5, WIDTH, generator=torch.Generator().manual_seed(0))


class Block(nn.Module):
    """Pre-norm, with two norms in a row or one."""

    def __init__(self, doubled: bool) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(WIDTH, eps=1e-6)
        self.second = nn.RMSNorm(WIDTH, eps=1e-6) if doubled else nn.Identity()
        self.read = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.read(self.second(self.norm(x))))


class Scaled(Block):
    """Multiplies its write by the gain of another module's norm."""

    def __init__(self, gain: nn.Parameter) -> None:
        super().__init__(False)
        self.gain = gain

    def forward(self, x: Tensor) -> Tensor:
        return x + self.gain * torch.tanh(self.read(self.second(self.norm(x))))


def tied(doubled: bool = False) -> nn.Module:
    torch.manual_seed(0)
    model = shuffled(nn.Sequential(Block(doubled), Block(False), nn.RMSNorm(WIDTH, eps=1e-6), nn.Linear(WIDTH, 8)))
    model[1].norm.weight = model[0].norm.weight
    return model


def of(rewrite: Rewrite, model: nn.Module) -> Sites:
    return rewrite.sites(Survey.of(model, X))


def whys(found: Sites) -> dict[str, str]:
    return {each.path: each.why for each in found.refused}


def test_a_second_norm_does_not_go_into_a_gain_that_another_block_has() -> None:
    found = of(RemoveNorms(), tied(doubled=True))
    assert not found.sites
    assert whys(found) == {"0.second": "0.norm, which it would go into, stays: 0.norm.weight is used in 1.norm too"}


def test_the_same_gain_outside_of_norms() -> None:
    torch.manual_seed(0)
    first = Block(True)
    model = shuffled(nn.Sequential(first, Scaled(first.norm.weight), nn.RMSNorm(WIDTH), nn.Linear(WIDTH, 8)))
    assert whys(of(RemoveNorms(), model))["0.second"].endswith("stays: 0.norm.weight is used in 1 too")
    assert whys(of(FoldGains(), model))["0.norm"] == "0.norm.weight is used in 1 too"
    assert whys(of(ToDyT(), model)).keys() == {"0.norm"}


def test_folding_and_calibrating_leave_shared_gains() -> None:
    model = tied()
    folded, bent = of(FoldGains(), model), of(ToDyT(), model)
    assert {s.path for s in folded.sites} == {s.path for s in bent.sites} == {"2"}
    assert whys(folded) == {
        "0.norm": "0.norm.weight is used in 1.norm too",
        "1.norm": "0.norm.weight is used in 0.norm too",
    }
    assert whys(bent).keys() == {"0.norm", "1.norm"}
    assert all(why.endswith('its own; start="unit" leaves the gain') for why in whys(bent).values())


def test_from_unit_alphas_a_shared_gain_stays_and_the_norms_go() -> None:
    model = tied()
    gain = model[0].norm.weight.clone()
    plan = make_plan(model, [ToDyT("unit")], X).apply()
    assert len(plan.steps[0][1].sites) == 3
    assert torch.equal(model[0].norm.weight, gain)
    assert model[0].norm.weight is model[1].norm.weight


def test_a_norm_that_runs_twice_has_its_gain_for_itself() -> None:
    model = tied()
    model[1].norm = model[0].norm
    assert "0.norm" in {site.path for site in of(ToDyT(), model).sites}
