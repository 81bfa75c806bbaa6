"""A factor that writers take up acts once, also where one of them reads what another gives."""

from __future__ import annotations

import pytest
import torch
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
    why = r"second.weight: it reads what another writer gives, and something else|first.weight: its product passes"
    with pytest.raises(RewriteError, match=f"2 refused: 0: 0.write.({why})"):
        applied(*stack(*case), ScaleResidual())


def test_a_weight_that_reads_itself_is_refused() -> None:
    with pytest.raises(RewriteError, match=r"2 refused: 0: 0.write.second.weight: it reads what another writer gives"):
        applied(*stack(Again, nn.Identity()), ScaleResidual())
