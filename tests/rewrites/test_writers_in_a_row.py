"""A factor that writers take up acts once, also where one of them reads what another gives."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from normprobe.errors import RewriteError
from normprobe.rewrites import ScaleResidual
from tests.models import WIDTH, shuffled
from tests.rewrites.cases import applied, outputs, snapshot


class Write(nn.Module):
    """y + second(bend(y)) for y = first(x): as a short convolution with a skip behind a projection writes."""

    def __init__(self, bend: nn.Module) -> None:
        super().__init__()
        self.first, self.second, self.bend = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), bend

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        found: Tensor = y + self.second(self.bend(y))
        return found


class Beside(Write):
    """The second weight reads something else too."""

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        found: Tensor = y + self.second(y + torch.tanh(x))
        return found


class Gated(Write):
    """What the second reads is multiplied by a signal."""

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        found: Tensor = y + self.second(y * torch.sigmoid(x))
        return found


class Squared(Write):
    """What the second reads grows by the square of the factor."""

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        found: Tensor = y + self.second(y * y)
        return found


class Again(Write):
    """The second weight reads what is no write too, by itself."""

    def forward(self, x: Tensor) -> Tensor:
        y = self.second(x)
        found: Tensor = y + self.second(y)
        return found


class Block(nn.Module):
    """x + write(norm(x))."""

    def __init__(self, write: nn.Module) -> None:
        super().__init__()
        self.norm, self.write = nn.LayerNorm(WIDTH), write

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = x + self.write(self.norm(x))
        return found


def stack(write: type[Write], bend: nn.Module) -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    model = shuffled(nn.Sequential(*(Block(write(bend)) for _ in range(2)), nn.LayerNorm(WIDTH)))
    return model.double(), torch.randn(2, 5, WIDTH).double()


@pytest.mark.parametrize("bend", [nn.Identity(), nn.ReLU(), nn.LeakyReLU()], ids=lambda each: type(each).__name__)
@pytest.mark.parametrize("write", [Write, Gated])
def test_the_second_weight_stays_where_all_that_it_reads_is_scaled(write: type[Write], bend: nn.Module) -> None:
    model, x = stack(write, bend)
    before, kept = outputs(model, x), snapshot(model)
    plan = applied(model, x, ScaleResidual("constant", 0.25, expect=2))
    assert torch.allclose(outputs(model, x), before, rtol=0, atol=1e-12)
    names = {f"{i}.write.{own}" for i in range(2) for own in ("first.weight", "first.bias", "second.bias")}
    assert {name for site in plan.steps[0][1].sites for name in site.touched} == names
    plan.undo()
    assert snapshot(model) == kept


@pytest.mark.parametrize("case", [(Beside, nn.Identity()), (Squared, nn.Identity()), (Write, nn.Softplus())])
def test_a_weight_that_reads_more_than_the_other_writer_is_refused(case: tuple[type[Write], nn.Module]) -> None:
    why = "2 refused: 0: 0.write.second.weight: it reads what another writer gives, and something else"
    with pytest.raises(RewriteError, match=why):
        applied(*stack(*case), ScaleResidual())


def test_a_weight_that_reads_itself_is_refused() -> None:
    with pytest.raises(RewriteError, match=r"2 refused: 0: 0.write.second.weight: it reads what another writer gives"):
        applied(*stack(Again, nn.Identity()), ScaleResidual())


class Bent(Write):
    """first(x), bent by what is no module of its own; there is no second."""

    def __init__(self, bend: nn.Module) -> None:
        super().__init__(bend)
        del self.second

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.bend(self.first(x))
        return found


class Function(nn.Module):
    """A function as a module."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


CURVED: dict[str, Callable[[Tensor], Tensor]] = {
    "relu6": F.relu6,
    "hardtanh": lambda y: F.hardtanh(y, -9.0, 9.0),
    "clamp": lambda y: y.clamp(-9.0, 9.0),
    "threshold": lambda y: F.threshold(y, 1e-3, 0.0),
    "softshrink": lambda y: F.softshrink(y, 1e-3),
    "where": lambda y: torch.where(y.abs() > 9.0, torch.zeros_like(y), y),
    "plus a number": lambda y: y + 1e-3,
    "round": lambda y: y.round(decimals=9),
    "tanh": torch.tanh,
}
STRAIGHT: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": torch.relu,
    "leaky": lambda y: F.leaky_relu(y, 0.2),
    "moves": lambda y: y.mT.contiguous().mT,
}


@pytest.mark.parametrize("name", CURVED)
def test_a_factor_does_not_go_past_what_is_straight_on_these_inputs_alone(name: str) -> None:
    """Some of these bend far outside of what is written here: no proof on these inputs can tell."""
    with pytest.raises(RewriteError, match=r"2 refused[^;]*0: 0.write.\S*: its product passes"):
        applied(*stack(Bent, Function(CURVED[name])), ScaleResidual("constant", 0.9))


@pytest.mark.parametrize("name", STRAIGHT)
def test_a_factor_goes_past_what_is_straight_above_0(name: str) -> None:
    model, x = stack(Bent, Function(STRAIGHT[name]))
    before = outputs(model, x)
    applied(model, x, ScaleResidual("constant", 0.9, expect=2))
    assert torch.allclose(outputs(model, x), before, rtol=0, atol=1e-12)
