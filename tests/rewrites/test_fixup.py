"""Fixup and T-Fixup: no norms, weights by their formulas, learned numbers where they belong, steps of one size."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from normprobe.errors import RewriteError
from normprobe.rewrites import Fixup, Survey
from normprobe.rewrites.initialise.schemes import kaiming_gain
from tests import models
from tests.rewrites.cases import applied, snapshot

CHANNELS = 16


class Block(nn.Module):
    """x + bn(conv(relu(bn(conv(x))))) with a ReLU on the sum."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = (nn.Conv2d(CHANNELS, CHANNELS, 3, padding=1, bias=False) for _ in range(2))
        self.norm1, self.norm2 = nn.BatchNorm2d(CHANNELS), nn.BatchNorm2d(CHANNELS)
        self.act = nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = x + self.norm2(self.second(self.act(self.norm1(self.first(x)))))
        return found


def resnet(blocks: int) -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    stem, rest = nn.Conv2d(3, CHANNELS, 3, padding=1), [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(CHANNELS, 5)]
    model = nn.Sequential(stem, *(Block() for _ in range(blocks)), *rest).eval()
    return model, torch.randn(8, 3, 6, 6)


def test_all_three_moves_are_made_and_taken_back() -> None:
    model, x = resnet(8)
    kept = snapshot(model)
    plan = applied(model, x, Fixup())
    block = model[3]
    writes, depth = 8, 2
    wanted = writes ** (-1 / (2 * depth - 2)) * kaiming_gain("relu") / (CHANNELS * 9) ** 0.5
    assert block.first.weight.std().item() == pytest.approx(wanted, rel=0.1)
    assert not bool(block.second.weight.any())
    assert not bool(model[-1].weight.any())
    assert isinstance(block.norm1, nn.Identity)
    assert not any(norm.kind == "batchnorm" for norm in Survey.of(model, x).anatomy.norms)
    assert (block.norm2.branch_scale.item(), block.first.fixup_offset.item()) == (1.0, 0.0)
    names = {name.rpartition(".")[2] for name, _ in block.named_parameters()}
    assert names == {"weight", "branch_scale", "fixup_offset"}
    assert {name for name, _ in block.named_parameters() if name.endswith("fixup_offset")} == {
        "first.fixup_offset",
        "second.fixup_offset",
        "act.fixup_offset",
    }
    plan.undo()
    assert snapshot(model) == kept


def test_a_step_moves_the_output_as_far_at_every_depth() -> None:
    """Zhang, Dauphin & Ma 2019, sec. 3: an update of size η changes the function by Θ(η)."""

    def moved(blocks: int) -> float:
        model, x = resnet(blocks)
        applied(model, x, Fixup())
        wanted = torch.randint(0, 5, (8,), generator=torch.Generator().manual_seed(1))
        optimiser: Any = torch.optim.SGD(model.parameters(), lr=0.05)
        with torch.no_grad():
            model[-1].weight.normal_(0, 0.1)  # a head that lets gradients through
            before = model(x)
        nn.functional.cross_entropy(model(x), wanted).backward()
        optimiser.step()
        with torch.no_grad():
            return float((model(x) - before).norm())

    few, many = moved(2), moved(32)
    assert 1 / 3 < many / few < 3


def test_every_number_learns() -> None:
    model, x = resnet(3)
    applied(model, x, Fixup())
    with torch.no_grad():
        model[-1].weight.normal_()
        for block in model[1:4]:
            block.second.weight.normal_(0, 0.1)
    model(x).square().sum().backward()
    numbers = [p for name, p in model.named_parameters() if p.dim() == 0]
    assert len(numbers) == 3 * 4
    assert all(p.grad is not None and bool(p.grad.abs() > 0) for p in numbers)


@pytest.mark.parametrize("name", ["gpt2", "llama", "t5", "bert"])
@pytest.mark.parametrize("variant", ["fixup", "t_fixup"])
def test_transformers_lose_every_norm(name: str, variant: Any) -> None:
    model, inputs = getattr(models, name)()
    kept = snapshot(model)
    plan = applied(model, inputs, Fixup(variant, seed=3))
    assert {norm.kind for norm in Survey.of(model, inputs).anatomy.norms} <= {"identity", "affine"}
    plan.undo()
    assert snapshot(model) == kept


def test_t_fixup_has_its_formulas() -> None:
    model, inputs = models.t5(num_decoder_layers=3)
    applied(model, inputs, Fixup("t_fixup"))
    width, hidden, inner = models.WIDTH, models.HIDDEN, 32
    encoder, decoder = 0.67 * 2**-0.25, (9 * 3) ** -0.25

    def std(parameter: Tensor) -> float:
        return parameter.std().item()

    assert std(model.encoder.block[0].layer[1].DenseReluDense.wi.weight) == pytest.approx(
        encoder * (2 / (width + hidden)) ** 0.5, rel=0.08
    )
    assert std(model.decoder.block[0].layer[2].DenseReluDense.wo.weight) == pytest.approx(
        decoder * (2 / (width + hidden)) ** 0.5, rel=0.08
    )
    attention = model.decoder.block[1].layer[1].EncDecAttention
    assert std(attention.q.weight) == pytest.approx((2 / (width + inner)) ** 0.5, rel=0.08)
    assert std(attention.v.weight) == pytest.approx(decoder * (2 / (width + inner)) ** 0.5, rel=0.08)
    assert std(model.shared.weight) == pytest.approx(decoder * width**-0.5, rel=0.08)


def test_a_model_without_a_stream_is_refused() -> None:
    with pytest.raises(RewriteError, match="no residual stream"):
        applied(nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2)), torch.randn(2, 4), Fixup())


class Functional(nn.Module):
    """A pre-norm branch whose norm is no module, with the gain in the block."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.full((CHANNELS,), 1.5))
        self.up, self.down = nn.Linear(CHANNELS, 2 * CHANNELS), nn.Linear(2 * CHANNELS, CHANNELS)

    def forward(self, x: Tensor) -> Tensor:
        y = self.up(nn.functional.layer_norm(x, (CHANNELS,), self.gain))
        out: Tensor = x + self.down(y.relu())
        return out


def test_the_gain_of_a_norm_that_cannot_go_stays() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*(Functional() for _ in range(4)), nn.Linear(CHANNELS, 5)).eval()
    kept = model[0].up.weight.detach().clone()
    plan = applied(model, torch.randn(2, 6, CHANNELS), Fixup())
    why = "it is written out inside a forward and cannot go"
    refused = next(line for line in str(plan).splitlines() if why in line)
    assert "0#native_layer_norm:0" in refused
    assert model[0].gain.tolist() == [1.5] * CHANNELS
    assert not torch.equal(model[0].up.weight, kept)


class Twice(nn.Module):
    """One activation module inside the branch and on the sum, as torchvision's residual blocks have it."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = (nn.Conv2d(CHANNELS, CHANNELS, 3, padding=1) for _ in range(2))
        self.act = nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.act(x + self.second(self.act(self.first(x))))
        return out


def test_an_activation_that_runs_at_several_places_gets_no_offset() -> None:
    """It would move the trunk too."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, CHANNELS, 3), *(Twice() for _ in range(3)), nn.Flatten(), nn.Linear(256, 5))
    plan = applied(model.eval(), torch.randn(2, 3, 6, 6), Fixup())
    assert "6 activations are no modules of their own: no offset is added before them" in str(plan)
    assert not [name for name, _ in model.named_parameters() if name.endswith("act.fixup_offset")]
    assert [name for name, _ in model.named_parameters() if name.endswith("first.fixup_offset")]
