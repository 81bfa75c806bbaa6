"""Weights that are computed, or kept in integers: `Initialise` names them, and `Fixup` stays off where one writes."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations

from normprobe.errors import RewriteError
from normprobe.rewrites import Fixup, Initialise, MuP, make_plan
from tests.models import WIDTH

Made = Callable[[nn.Linear], nn.Module]
X = torch.randn(2, 5, WIDTH, generator=torch.Generator().manual_seed(0))


class Integers(nn.Module):
    """A weight of eight bits with a scale for each row."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        scale = linear.weight.detach().abs().amax(1, keepdim=True) / 127
        self.weight = nn.Parameter((linear.weight.detach() / scale).round().to(torch.int8), requires_grad=False)
        self.scale, self.bias = nn.Parameter(scale), linear.bias

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight.to(x.dtype) * self.scale, self.bias)


class Block(nn.Module):
    def __init__(self, up: Made, down: Made) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), up(nn.Linear(WIDTH, 48)), down(nn.Linear(48, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = x + self.down(F.gelu(self.up(self.norm(x))))
        return found


def stack(up: Made, down: Made) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(Block(up, down) for _ in range(2)), nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 8)).eval()


MADE: dict[str, Made] = {
    "weight norm": parametrizations.weight_norm,
    "spectral norm": parametrizations.spectral_norm,
    "integers": Integers,
}


@pytest.mark.parametrize("name", MADE)
def test_what_cannot_be_drawn_is_named(name: str) -> None:
    model = stack(nn.Identity(), MADE[name])
    for rewrite in (Initialise(), MuP(16)):
        refused = {each.path: each.why for each in make_plan(model, [rewrite], X).steps[0][1].refused}
        assert {"0.down", "1.down"} <= refused.keys()
        assert refused["0.down"].startswith("its weight is computed from 0.down.")
    assert not make_plan(model, [Initialise(only="readers")], X).steps[0][1].refused
    assert not make_plan(stack(nn.Identity(), nn.Identity()), [Initialise()], X).steps[0][1].refused


@pytest.mark.parametrize("variant", ["fixup", "t_fixup"])
@pytest.mark.parametrize("name", MADE)
def test_fixup_needs_its_writers(name: str, variant: str) -> None:
    with pytest.raises(
        RewriteError, match=r"Fixup would change nothing(?s:.)*2 refused: 0.down: its weight is computed"
    ):
        make_plan(stack(nn.Identity(), MADE[name]), [Fixup(variant)], X).apply()  # type: ignore[arg-type]
    assert make_plan(stack(MADE[name], nn.Identity()), [Fixup(variant)], X).steps[0][1].sites  # type: ignore[arg-type]
