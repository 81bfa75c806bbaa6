"""A bias is what is added to the product of a weight; gains, slopes and unused vectors beside it are none."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from normprobe.rewrites import Fixup, FoldGains, Initialise, MuP, Rewrite, make_plan
from normprobe.rewrites.base import Survey
from normprobe.rewrites.biases import Bias, find_biases
from tests.models import WIDTH, shuffled
from tests.rewrites.cases import outputs

INNER = 48
X = torch.randn(2, 5, WIDTH, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


class Gained(nn.Module):
    """y = gain · (W x) + bias."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(outputs, inputs) * 0.1)
        self.gain = nn.Parameter(torch.ones(outputs))
        self.bias = nn.Parameter(torch.zeros(outputs))

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight) * self.gain + self.bias


class Block(nn.Module):
    """Pre-norm: what `act` makes of the first product goes into a second."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)

    def up(self, x: Tensor) -> Tensor:
        raise NotImplementedError

    def forward(self, x: Tensor) -> Tensor:
        return x + self.up(self.norm(x))


class GainedBlock(Block):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Gained(WIDTH, INNER), Gained(INNER, WIDTH)

    def up(self, x: Tensor) -> Tensor:
        found: Tensor = self.second(F.gelu(self.first(x)))
        return found


class Raw(Block):
    """Two weights and all that belongs to them in one module, of which nothing but `b1` and `b2` is added."""

    def __init__(self, act: str) -> None:
        super().__init__()
        self.act = act
        self.w1, self.b1 = nn.Parameter(torch.randn(WIDTH, WIDTH) * 0.1), nn.Parameter(torch.zeros(WIDTH))
        self.w2, self.b2 = nn.Parameter(torch.randn(WIDTH, WIDTH) * 0.1), nn.Parameter(torch.zeros(WIDTH))
        self.slope, self.unused = nn.Parameter(torch.ones(WIDTH)), nn.Parameter(torch.ones(WIDTH))

    def up(self, x: Tensor) -> Tensor:
        h = F.linear(x, self.w1, self.b1)
        if self.act == "prelu":
            h = F.prelu(h.flatten(0, 1), self.slope).view_as(h)
        else:
            h = h * torch.sigmoid(self.slope * h)
        return F.linear(h, self.w2) + self.b2


def stack(*blocks: Block) -> nn.Module:
    torch.manual_seed(0)
    return shuffled(nn.Sequential(*blocks, nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 8))).double()


@pytest.mark.parametrize("act", ["prelu", "swish"])
def test_each_weight_has_the_bias_that_is_added_to_its_own_product(act: str) -> None:
    model = stack(Raw(act), Raw(act))
    found = find_biases(Survey.of(model, X), dict(model.named_parameters()))
    told = {name: [b.parameter for b in held] for name, held in found.items()}
    raw = {f"{i}.w{k}": [f"{i}.b{k}"] for i in range(2) for k in (1, 2)}
    assert told == {**raw, "3.weight": ["3.bias"]}


def test_a_bias_behind_a_gain_says_so() -> None:
    model = stack(GainedBlock(), GainedBlock())
    found = find_biases(Survey.of(model, X), dict(model.named_parameters()))
    assert found["0.first.weight"] == (Bias("0.first.bias", scaled=True),)
    assert found["3.weight"] == (Bias("3.bias"),)


def test_a_bias_over_rows_that_are_parameters_themselves_is_one() -> None:
    """As of the projection that DeBERTa's content and its table of positions share."""

    class Positions(Block):
        def __init__(self) -> None:
            super().__init__()
            self.table, self.linear = nn.Parameter(torch.randn(5, WIDTH)), nn.Linear(WIDTH, WIDTH)

        def up(self, x: Tensor) -> Tensor:
            found: Tensor = self.linear(x) * torch.tanh(self.linear(self.table))
            return found

    model = stack(Positions(), Positions())
    found = find_biases(Survey.of(model, X), dict(model.named_parameters()))
    assert [b.parameter for b in found["0.linear.weight"]] == ["0.linear.bias"]


@pytest.mark.parametrize("rewrite", [Initialise(), Fixup(), MuP(16)], ids=lambda each: each.name)
def test_gains_and_slopes_keep_their_values_where_weights_are_drawn(rewrite: Rewrite) -> None:
    for blocks in ((GainedBlock(), GainedBlock()), (Raw("swish"), Raw("prelu"))):
        model = stack(*blocks)
        kept = {n: p.clone() for n, p in model.named_parameters() if n.endswith(("gain", "slope", "unused"))}
        zero = [n for n, _ in model.named_parameters() if n.endswith(("first.bias", "second.bias", "b1", "b2"))]
        make_plan(model, [rewrite], X).apply()
        assert all(torch.equal(model.get_parameter(name), value) for name, value in kept.items())
        assert zero
        assert not any(model.get_parameter(name).any() for name in zero)


def test_an_offset_goes_into_the_one_bias_that_is_added_and_not_past_a_gain() -> None:
    model = stack(Raw("prelu"), GainedBlock())
    before = outputs(model, X)
    plan = make_plan(model, [FoldGains()], X).apply()
    assert torch.allclose(outputs(model, X), before, rtol=0, atol=1e-12)
    assert {site.path for site in plan.steps[0][1].sites} == {"0.norm", "2"}
    ((path, why),) = [(each.path, each.why) for each in plan.steps[0][1].refused]
    assert (path, why) == (
        "1.norm",
        "its offset has nowhere to go: 1.first.weight has the bias behind a factor",
    )


def test_what_is_added_and_multiplied_too_is_no_bias() -> None:
    class Both(Block):
        def __init__(self) -> None:
            super().__init__()
            self.w, self.v = nn.Parameter(torch.randn(WIDTH, WIDTH) * 0.1), nn.Parameter(torch.ones(WIDTH))

        def up(self, x: Tensor) -> Tensor:
            return torch.tanh(F.linear(x, self.w) + self.v) * self.v

    model = stack(Both(), Both())
    assert not find_biases(Survey.of(model, X), dict(model.named_parameters()))["0.w"]
