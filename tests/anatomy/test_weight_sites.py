"""Every weight with its role, fans, output axis and follower, read off the data flow."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from normprobe.anatomy.flow.build import build
from normprobe.anatomy.flow.levels import Levels
from normprobe.anatomy.flow.statics import Statics
from normprobe.anatomy.weights.sites import find_weights
from normprobe.capture.recorder import record
from normprobe.records import WeightSite
from tests.anatomy.reading import anatomy_of, named
from tests.models import HIDDEN, MODELS, SMALL, VOCABULARY, WIDTH, hugging_face, to_meta

Fans = tuple[int, int]


def weights_of(model: nn.Module, inputs: Any) -> dict[str, WeightSite]:
    return {w.parameter: w for w in anatomy_of(model, inputs).weights}


@pytest.mark.parametrize("name", MODELS)
def test_every_weight_of_the_catalogue_is_listed_once_with_its_true_fan_in(name: str) -> None:
    model, _ = MODELS[name]()
    listed = [w.parameter for w in named(name).weights]
    matrices = [n for n, p in model.named_parameters() if p.dim() > 1]
    assert sorted(listed) == sorted(matrices)
    for weight in named(name).weights:
        size = model.get_parameter(weight.parameter).shape
        assert weight.shape == size
        if weight.kind == "linear":
            assert (weight.fan_in, weight.fan_out) == (size[1 - weight.output_axis], size[weight.output_axis])


def test_roles_and_fans_of_gpt2_whose_matrices_lie_turned() -> None:
    found = {w.parameter: w for w in named("gpt2").weights}
    writer, reader = found["transformer.h.1.mlp.c_proj.weight"], found["transformer.h.1.mlp.c_fc.weight"]
    assert (writer.roles, writer.stream, writer.branch) == (("writer",), 0, 3)
    assert (writer.fan_in, writer.fan_out, writer.output_axis) == (4 * WIDTH, WIDTH, 1)
    assert (reader.roles, reader.followed_by) == (("reader",), "gelu")  # written out as a tanh of a cube
    assert found["transformer.wte.weight"].roles == ("embedding", "head")
    assert found["transformer.wpe.weight"].roles == ("embedding",)


@pytest.mark.parametrize("meta", [False, True])
def test_experts_are_many_matrices_in_one_parameter(meta: bool) -> None:
    model, inputs = hugging_face(
        "MixtralForCausalLM", "MixtralConfig", **SMALL, num_key_value_heads=2, num_local_experts=3
    )
    found = weights_of(to_meta(model) if meta else model, inputs)
    both = found["model.layers.0.mlp.experts.gate_up_proj"]
    down = found["model.layers.0.mlp.experts.down_proj"]
    assert (both.kind, both.fan_in, both.fan_out, both.output_axis) == ("experts", WIDTH, 2 * HIDDEN, 1)
    assert (down.kind, down.fan_in, down.fan_out, down.output_axis) == ("experts", HIDDEN, WIDTH, 1)
    assert (both.roles, both.followed_by, down.roles) == (("reader",), "silu", ("writer",))
    assert found["model.layers.0.mlp.gate.weight"].followed_by == "softmax"


class Packed(nn.Module):
    """A packed projection that is cut before the product, and one whose heads are matrices of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.packed = nn.Parameter(torch.randn(3 * WIDTH, WIDTH))
        self.heads = nn.Parameter(torch.randn(4, WIDTH, WIDTH // 4))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (F.linear(x, w) for w in self.packed.chunk(3))
        y = torch.einsum("bnd,hdk->bhnk", q * k.sigmoid() + v, self.heads)
        return y.flatten(1)


def test_a_packed_weight_counts_whole_and_heads_are_its_outputs() -> None:
    found = weights_of(Packed(), torch.randn(2, 5, WIDTH))
    assert (found["packed"].fan_in, found["packed"].fan_out) == (WIDTH, 3 * WIDTH)
    assert (found["heads"].fan_in, found["heads"].fan_out, found["heads"].kind) == (WIDTH, WIDTH, "linear")


def test_fans_of_convolutions() -> None:
    model = nn.Sequential(
        nn.Conv2d(4, 8, 3, groups=2), nn.LeakyReLU(0.1), nn.ConvTranspose2d(8, 6, (3, 2), groups=2), nn.BatchNorm2d(6)
    )
    first, second = weights_of(model.eval(), torch.randn(1, 4, 9, 9)).values()
    assert (first.fan_in, first.fan_out, first.output_axis) == (2 * 9, 4 * 9, 0)
    assert (second.fan_in, second.fan_out, second.output_axis) == (4 * 6, 3 * 6, 1)
    assert (first.kind, first.followed_by, second.followed_by) == ("conv", "leaky_relu", "norm")


class Followed(nn.Module):
    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.second, self.function = nn.Linear(8, 8), nn.Linear(8, 8), function

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.function(self.first(x)))


@pytest.mark.parametrize(
    ("function", "name"),
    [
        (F.relu, "relu"),
        (lambda x: x.clamp(min=0), "relu"),
        (lambda x: x.relu_().half().float(), "relu"),
        (F.gelu, "gelu"),
        (lambda x: x * 0.5 * (1 + torch.erf(x / 2**0.5)), "gelu"),
        (F.silu, "silu"),
        (lambda x: x * torch.sigmoid(x), "silu"),
        (torch.tanh, "tanh"),
        (torch.sigmoid, "sigmoid"),
        (lambda x: F.leaky_relu(x, 0.2), "leaky_relu"),
        (lambda x: x.softmax(-1), "softmax"),
        (lambda x: x * x.flip(-1), "gate"),
        (lambda x: F.layer_norm(x, (8,)), "norm"),
        (lambda x: x.view(-1, 4, 2).flatten(1), "none"),
        (torch.cos, "unknown"),
        (lambda x: x.relu().square(), "relu"),
    ],
)
def test_what_follows_a_product_is_told_by_what_it_computes(function: Any, name: str) -> None:
    assert weights_of(Followed(function), torch.randn(3, 8))["first.weight"].followed_by == name


class Sided(nn.Module):
    """A table, a kernel, a weight that is the second factor of its product and one that is the first."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.kernel, self.second = nn.Embedding(VOCABULARY, 8), nn.Conv1d(8, 8, 1), nn.Linear(8, 8)
        self.first = nn.Parameter(torch.randn(5, 8))

    def forward(self, ids: Tensor) -> Tensor:
        return self.first @ self.kernel(self.second(self.table(ids)).mT)[0]


@pytest.mark.parametrize("autocast", [False, True])
def test_which_operand_holds_the_weight(autocast: bool) -> None:
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        found = weights_of(Sided(), torch.randint(0, VOCABULARY, (2, 5)))
    operands = {name: site.operand for name, site in found.items()}
    assert operands == {"table.weight": 0, "kernel.weight": 1, "second.weight": 1, "first": 0}


class Computed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.free = nn.Linear(8, 8)
        self.normed = nn.utils.parametrizations.weight_norm(nn.Linear(8, 8))

    def forward(self, x: Tensor) -> Tensor:
        return self.normed(self.free(x))


def test_weights_that_are_computed_first_are_left_out() -> None:
    assert list(weights_of(Computed(), torch.randn(3, 8))) == ["free.weight"]


def test_a_tied_weight_has_the_roles_of_all_its_uses() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table, self.block = nn.Embedding(VOCABULARY, 8), nn.Linear(8, 8)

        def forward(self, ids: Tensor) -> Tensor:
            x = self.table(ids)
            x = x + F.layer_norm(self.block(x).relu(), (8,))
            return F.linear(F.layer_norm(x, (8,)), self.table.weight)

    found = weights_of(Tied(), torch.randint(0, VOCABULARY, (2, 5)))
    assert found["table.weight"].roles == ("embedding", "head")
    assert (found["table.weight"].fan_in, found["table.weight"].fan_out) == (1, 8)
    assert found["block.weight"].roles == ("reader", "writer")


def test_reading_the_weights_costs_milliseconds_a_thousand_operations() -> None:
    model = nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.GELU()) for _ in range(400)))
    trace = record(model, torch.randn(1, 4))
    flow = build(trace, Levels(trace), Statics(model, trace), [])
    start = time.process_time()
    assert len(find_weights(flow, [], None)) == 400
    assert time.process_time() - start < 0.05 * len(trace.nodes) / 1000 * 10
