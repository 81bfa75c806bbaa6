"""Layers hide nothing of the module below, and several of one kind act once each."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from normprobe.rewrites.at_boundary import AtInput, AtOutput, lay_at
from normprobe.rewrites.boundary import Boundary
from normprobe.rewrites.swap import Layer, lay
from normprobe.rewrites.way_back import Structure


class Named(nn.Module):
    """A module with the names that layers might be tempted to use."""

    def __init__(self) -> None:
        super().__init__()
        self.act, self.key, self.note = nn.ReLU(), nn.Linear(4, 4), nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.note(self.act(self.key(x)))
        return found


class Plus(AtOutput):
    NOTE = "adds 1"

    def normprobe_act(self, stream: Tensor) -> Tensor:
        return stream + 1


class Times(AtOutput):
    NOTE = "times 2"

    def normprobe_act(self, stream: Tensor) -> Tensor:
        return stream * 2


class Minus(AtInput):
    NOTE, KEY = "takes 3 off", "_normprobe_test_minus"

    def normprobe_act(self, stream: Tensor) -> Tensor:
        return stream - 3


class Halved(AtInput):
    NOTE, KEY = "halves", "_normprobe_test_halved"

    def normprobe_act(self, stream: Tensor) -> Tensor:
        return stream / 2


def test_every_layer_acts_once_in_its_order_and_hides_nothing() -> None:
    module, x = Named(), torch.randn(3, 4)
    key = module.key
    before = Structure(module)
    boundary = Boundary("here", "input", 0, "x")
    for layers in ((Minus, Plus), (Halved, Times)):
        lay_at(boundary, layers, module)
        lay(module, layers[1], "here")
    inner = torch.relu(key((x / 2) - 3))
    assert torch.equal(module(x), (inner + 1) * 2)
    assert module.key is key
    assert module.extra_repr() == "takes 3 off, adds 1, halves, times 2"
    before.put_back()
    assert type(module) is Named
    assert torch.equal(module(x), torch.relu(key(x)))


def test_layers_define_no_name_that_a_module_is_likely_to_have() -> None:
    own = {name for layer in _all(Layer) for name in vars(layer) if not name.startswith("_")}
    assert own <= {
        "forward",
        "LAST",
        "extra_repr",
        "NOTE",
        "KEY",
        "HELD",
        "ASIDE",
        "normprobe_act",
        "normprobe_below",
        "normprobe_name",
    }


def _all(kind: type) -> set[type]:
    return {kind}.union(*(_all(each) for each in kind.__subclasses__() if "normprobe" in each.__module__))
