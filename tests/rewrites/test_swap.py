"""Layers over a module's class: stacked, copied, and refused."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from normprobe.errors import RewriteError
from normprobe.rewrites.swap import Layer, lay, why_not
from normprobe.rewrites.way_back import Structure


class Doubling(Layer):
    NOTE = "doubled"

    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


class Adding(Layer):
    NOTE = "one more"

    def forward(self, x: Tensor) -> Tensor:
        return 1 + super().forward(x)


def stacked() -> nn.Module:
    module = nn.Identity()
    lay(module, Doubling, "here")
    lay(module, Adding, "here")
    return module


def value(module: nn.Module) -> float:
    return float(module(torch.tensor(3.0)))


def test_layers_stack_and_are_copied() -> None:
    module = stacked()
    assert value(module) == 7
    assert value(copy.deepcopy(module)) == 7
    assert repr(module) == "Identity(doubled, one more)"


def test_the_same_layer_does_not_lie_twice() -> None:
    module = stacked()
    with pytest.raises(RewriteError, match=r"here cannot be changed once more(.|\n)*found: doubled"):
        lay(module, Doubling, "here")
    assert value(module) == 7


def test_a_module_whose_forward_is_hidden_is_refused() -> None:
    module = nn.Identity()
    assert why_not(module) is None
    module.forward = module.forward
    assert "replaced on the instance" in (why_not(module) or "")


def test_what_changed_goes_back_and_all_else_stays() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2), nn.Identity())
    linear, identity, weight = model[0], model[2], model[0].weight
    before = Structure(model)
    lay(linear, Doubling, "0")
    linear.__dict__["held"] = 1
    del linear._parameters["weight"]
    linear.register_parameter("more", nn.Parameter(torch.zeros(1)))
    model._modules["2"] = nn.ReLU()
    model[1].running_mean = None
    changes, others = before.settle()
    assert [change.path for change in changes] == [".", "0", "1"]
    assert others == (identity, model[2])
    mine = nn.Parameter(torch.ones(1))
    linear.register_parameter("mine", mine)
    model.eval()
    before.put_back()
    assert type(linear) is nn.Linear
    assert list(linear._parameters) == ["weight", "bias", "mine"]
    assert linear.weight is weight
    assert "held" not in linear.__dict__
    assert not linear.training
    assert model[2] is identity
    assert float(model[1].running_mean.sum()) == 0
