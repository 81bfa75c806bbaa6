"""Which axes grow, which role that gives, and the groups and initial scales of muP."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import normprobe
from normprobe.errors import SettingError
from normprobe.sweeping.mup import initial_factors, rescale
from normprobe.sweeping.roles import places

IDS = torch.tensor([[1, 2, 3]])


class Net(nn.Module):
    """An embedding, a bottleneck whose two axes grow at different rates, and a readout of the embedding's shape."""

    def __init__(self, width: int, hidden: int, tied: bool = False) -> None:
        super().__init__()
        self.table = nn.Embedding(11, width)
        self.up = nn.Linear(width, hidden)
        self.down = nn.Linear(hidden, width)
        self.norm = nn.LayerNorm(width)
        self.out = nn.Linear(width, 11, bias=False)
        if tied:
            self.out.weight = self.table.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.table(ids)
        return torch.as_tensor(self.out(self.norm(x + self.down(torch.relu(self.up(x))))))


def test_roles_of_a_small_network() -> None:
    found = places(Net(16, 64), Net(8, 16), IDS, IDS)
    assert {name: (place.role, place.ratio) for name, place in found.items()} == {
        "table.weight": ("input", 1.0),
        "up.weight": ("hidden", 2.0),
        "up.bias": ("input", 1.0),
        "down.weight": ("hidden", 4.0),
        "down.bias": ("input", 1.0),
        "norm.weight": ("input", 1.0),
        "norm.bias": ("input", 1.0),
        "out.weight": ("readout", 2.0),
    }


def test_a_shared_table_is_told() -> None:
    found = places(Net(16, 64, tied=True), Net(8, 16, tied=True), IDS, IDS)
    assert (found["table.weight"].role, found["table.weight"].ratio) == ("shared", 2.0)
    assert found["table.weight"].readout == "out"


def test_weights_that_a_forward_writes_are_put_back() -> None:
    class Halving(Net):
        def forward(self, ids: Tensor) -> Tensor:
            with torch.no_grad():
                self.up.weight.div_(2)
            return super().forward(ids)

    model, base = Halving(16, 64), Halving(8, 16)
    kept = model.up.weight.detach().clone()
    places(model, base, IDS, IDS)
    assert torch.equal(model.up.weight, kept)


def test_a_module_that_is_not_called_has_no_role() -> None:
    model, base = Net(16, 64), Net(8, 16)
    model.spare, base.spare = nn.Linear(16, 3), nn.Linear(8, 3)
    place = places(model, base, IDS, IDS)["spare.weight"]
    assert (place.role, place.why) == ("unknown", "its module was not called")


def test_a_holder_that_is_not_called_says_nothing_of_a_shared_table() -> None:
    model, base = Net(16, 64, tied=True), Net(8, 16, tied=True)
    for net in (model, base):
        spare = nn.Linear(net.out.in_features, 11, bias=False)
        spare.weight = net.table.weight
        net.spare = spare
    place = places(model, base, IDS, IDS)["table.weight"]
    assert (place.role, place.ratio, place.readout) == ("shared", 2.0, "out")


def test_the_fan_in_of_a_convolution_and_of_a_transposed_weight() -> None:
    class Transposed(nn.Module):
        def __init__(self, width: int) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(width, width * width))

        def forward(self, x: Tensor) -> Tensor:
            return x @ self.weight

    x, y = torch.randn(2, 8), torch.randn(2, 4)
    assert places(Transposed(8), Transposed(4), x, y)["weight"].ratio == 2
    wide, narrow = nn.Conv2d(6, 12, 3), nn.Conv2d(3, 4, 3)
    found = places(wide, narrow, torch.randn(1, 6, 5, 5), torch.randn(1, 3, 5, 5))
    assert (found["weight"].role, found["weight"].ratio) == ("hidden", 2.0)


def test_groups_hold_every_parameter_once_at_the_rates_of_the_paper() -> None:
    model = Net(16, 64)
    groups = normprobe.parameter_groups(model, 0.1, Net(8, 16), IDS)
    rates = {name: group["lr"] for group in groups for name in group["names"]}
    assert rates["up.weight"] == pytest.approx(0.05)
    assert rates["down.weight"] == pytest.approx(0.025)
    assert rates["out.weight"] == pytest.approx(0.05)
    assert rates["table.weight"] == rates["norm.weight"] == rates["up.bias"] == 0.1
    held = [id(p) for group in groups for p in group["params"]]
    assert sorted(held) == sorted(id(p) for p in model.parameters())
    torch.optim.Adam(groups)


def test_rates_of_sgd_go_by_fan_in_and_fan_out() -> None:
    """Yang et al. 2022, table 3: the width doubles, the bottleneck grows fourfold."""
    groups = normprobe.parameter_groups(Net(16, 64), 0.1, Net(8, 16), IDS, optimizer="sgd")
    rates = {name: group["lr"] for group in groups for name in group["names"]}
    assert rates["up.weight"] == pytest.approx(0.1 * 4 / 2)
    assert rates["down.weight"] == pytest.approx(0.1 * 2 / 4)
    assert rates["out.weight"] == pytest.approx(0.1 / 2)
    assert rates["table.weight"] == rates["norm.weight"] == rates["down.bias"] == pytest.approx(0.2)
    assert rates["up.bias"] == pytest.approx(0.4)
    tied = normprobe.parameter_groups(Net(16, 64, True), 0.1, Net(8, 16, True), IDS, optimizer="sgd")
    assert {g["lr"] for g in tied if g["role"] == "shared"} == {0.2}


def test_groups_leave_the_model_as_it_was() -> None:
    model = Net(16, 64)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    normprobe.parameter_groups(model, 0.1, Net(8, 16), IDS)
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert model.training
    assert not any(module._forward_hooks for module in model.modules())


def test_initial_scales_are_those_of_the_base_at_the_powers_of_the_paper() -> None:
    torch.manual_seed(0)
    model, base = Net(256, 1024), Net(64, 256)
    for net in (model, base):
        for p in net.parameters():
            if p.dim() == 2:
                nn.init.normal_(p, std=0.02)
    rescale(model, initial_factors(model, base, places(model, base, IDS, IDS)))
    assert float(model.up.weight.detach().std()) == pytest.approx(0.02 / 2, rel=0.05)
    assert float(model.out.weight.detach().std()) == pytest.approx(0.02 / 4, rel=0.05)
    assert float(model.table.weight.detach().std()) == pytest.approx(0.02, rel=0.1)
    assert torch.equal(model.norm.weight, torch.ones(256))
    assert not model.norm.bias.any()


def test_what_is_no_base_is_refused() -> None:
    with pytest.raises(SettingError, match="the base has the same width"):
        normprobe.parameter_groups(Net(8, 16), 0.1, Net(8, 16), IDS)
    with pytest.raises(SettingError, match=r"(?s)the base is another model.*found: 0\.bias"):
        normprobe.parameter_groups(Net(8, 16), 0.1, nn.Sequential(nn.Linear(2, 2)), IDS)
    with pytest.raises(SettingError, match="the learning rate cannot be used"):
        normprobe.parameter_groups(Net(16, 16), 0.0, Net(8, 16), IDS)
