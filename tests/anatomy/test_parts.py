"""Gains and offsets that a forward selects from one parameter are read as that part of it."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import normprobe
from normprobe.capture.parts import Parts, held_part
from normprobe.records.parts import cuts_of, part_name, whole
from tests.anatomy.reading import anatomy_of

WIDTH, LAYERS = 8, 3


class Stacked(nn.Module):
    """Layer norms written out, whose gain and offset `take` selects from what one parameter holds for all layers."""

    def __init__(self, take: Callable[[Stacked, int], tuple[Tensor, Tensor]]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.take = take
        self.g, self.b = (nn.Parameter(torch.randn(LAYERS, WIDTH)) for _ in range(2))
        self.columns = nn.Parameter(torch.randn(WIDTH, LAYERS))
        self.flat = nn.Parameter(torch.randn(LAYERS * WIDTH))
        self.deep = nn.Parameter(torch.randn(2, LAYERS, WIDTH))
        self.w = nn.Parameter(torch.randn(LAYERS, WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        for layer in range(LAYERS):
            gain, offset = self.take(self, layer)
            h = x - x.mean(-1, keepdim=True)
            h = h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + 1e-5) * gain + offset
            x = x + F.gelu(h @ self.w[layer])
        return x


WAYS: dict[str, tuple[Callable[[Stacked, int], tuple[Tensor, Tensor]], str]] = {
    "index": (lambda m, i: (m.g[i], m.b[i]), "g[{0}]"),
    "unbind": (lambda m, i: (m.g.unbind(0)[i], m.b[i]), "g[{0}]"),
    "chunk": (lambda m, i: (m.g.chunk(LAYERS)[i], m.b[i]), "g[{0}:{1}]"),
    "narrow": (lambda m, i: (m.g.narrow(0, i, 1), m.b[i]), "g[{0}:{1}]"),
    "column": (lambda m, i: (m.columns[:, i], m.b[i]), "columns[:, {0}]"),
    "slice": (lambda m, i: (m.flat[i * WIDTH : (i + 1) * WIDTH], m.b[i]), "flat[{2}:{3}]"),
    "split": (lambda m, i: (m.flat.split(WIDTH)[i], m.b[i]), "flat[{2}:{3}]"),
    "twice": (lambda m, i: (m.deep[1][i], m.b[i]), "deep[1, {0}]"),
    "viewed": (lambda m, i: (m.g[i].view(1, 1, -1), m.b[i]), "g[{0}]"),
}


@pytest.mark.parametrize("way", WAYS)
def test_the_part_is_named(way: str) -> None:
    take, name = WAYS[way]
    model = Stacked(take)
    norms = anatomy_of(model, torch.randn(2, 5, WIDTH)).norms
    told = [name.format(i, i + 1, i * WIDTH, (i + 1) * WIDTH) for i in range(LAYERS)]
    assert [(norm.affine, norm.weight, norm.bias) for norm in norms] == [
        ("weight+bias", text, f"b[{i}]") for i, text in enumerate(told)
    ]
    for layer, text in enumerate(told):
        assert torch.equal(held_part(model, text).flatten(), take(model, layer)[0].flatten())


def test_layers_that_use_their_gains_in_different_ways() -> None:
    model = Stacked(lambda m, i: (m.g[i] + 1 if i == 1 else m.g[i], m.b[i]))
    norms = anatomy_of(model, torch.randn(2, 5, WIDTH)).norms
    assert [norm.affine for norm in norms] == ["weight+bias", "one_plus_weight+bias", "weight+bias"]


def test_what_is_no_part_is_no_parameter() -> None:
    model = Stacked(lambda m, i: (m.g[i] * m.g[0], m.b[i]))
    norms = anatomy_of(model, torch.randn(2, 5, WIDTH)).norms
    assert [norm.weight for norm in norms] == [None] * LAYERS
    stepped = Stacked(lambda m, i: (m.flat[i::LAYERS], m.b[i]))  # a part, but no run of the axis
    assert [norm.weight for norm in anatomy_of(stepped, torch.randn(2, 5, WIDTH)).norms] == [None] * LAYERS


@pytest.mark.parametrize(
    ("cuts", "name"),
    [
        ((2,), "w[2]"),
        ((slice(None), 1), "w[:, 1]"),
        ((slice(1, 3), slice(None)), "w[1:3]"),
        ((slice(None), slice(None)), "w"),
        ((0, slice(1, 2)), "w[0, 1:2]"),
    ],
)
def test_names_of_parts(cuts: tuple[int | slice, ...], name: str) -> None:
    tensor = torch.randn(4, 4)
    assert part_name("w", cuts) == name
    assert whole(name, ()) == "w"
    assert torch.equal(Parts({"w": tensor})[name], tensor[cuts])
    assert torch.equal(tensor[cuts_of(name, ())[1]], tensor[cuts])


def test_a_name_that_is_held_is_no_part() -> None:
    held = torch.zeros(1)
    parts = Parts({"w[0]": held})
    assert parts["w[0]"] is held
    assert "v[0]" not in parts


@pytest.mark.parametrize("name", ["w[0]", "w[1:2]", "w[:, 3]"])
def test_a_parameter_that_is_called_like_a_part_is_a_whole_one(name: str) -> None:
    assert whole(name, {name}) == name
    model = Bracketed()
    held = held_part(model, "gains.g[0]")
    assert held is model.gains["g[0]"]


class Bracketed(nn.Module):
    """Norms whose gains are held under names with brackets."""

    def __init__(self) -> None:
        super().__init__()
        self.gains = nn.ParameterDict({f"g[{i}]": nn.Parameter(torch.ones(WIDTH)) for i in range(LAYERS)})
        self.maps = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))

    def forward(self, x: Tensor) -> Tensor:
        for i, linear in enumerate(self.maps):
            x = x + linear(nn.functional.rms_norm(x, (WIDTH,), self.gains[f"g[{i}]"]))
        return x


def test_names_with_brackets_are_judged_and_spared_as_any_other() -> None:
    model, x = Bracketed(), torch.randn(2, 5, WIDTH)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.1)
    report = normprobe.probe(model, x, level="backward", optimizer=optimizer)
    assert [norm.weight for norm in report.anatomy.norms] == list(names := [f"gains.{name}" for name in model.gains])
    assert report.measurements.optimizer is not None
    assert [norm.parameter for norm in report.measurements.optimizer.norms] == names
    assert set(names) <= set(normprobe.decay_groups(model, 0.1, x)[1]["names"])
    assert normprobe.diff(model, copy.deepcopy(model), x).data.verdict == "same"
