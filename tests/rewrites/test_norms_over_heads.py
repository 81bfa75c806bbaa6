"""Norms that split heads off before their statistic, or join them before their gain, are no closed form of what they
are given: every rewrite that would lay one over them says so."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from normprobe.rewrites import FuseNorms, Rewrite, SetEps, StoreGains, Survey, ToDyT, make_plan
from tests.models import WIDTH, shuffled
from tests.rewrites.cases import outputs, snapshot

HEAD = 8


class Joining(nn.Module):
    """RMSNorm of (…, heads, features), joined before the gain; its eps is outside the root."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return (x / (x.pow(2).mean(-1, keepdim=True).sqrt() + 1e-3)).flatten(-2) * self.weight


class Back(Joining):
    """The same, with heads again behind the gain."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).unflatten(-1, (-1, HEAD))


class Splitting(Joining):
    """The same of (…, width)."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.unflatten(-1, (-1, HEAD)))


class Inside(nn.Module):
    """RMSNorm over heads of (…, width) with eps inside the root and a gain of each feature."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        rows = x.unflatten(-1, (-1, HEAD))
        return (rows * torch.rsqrt(rows.pow(2).mean(-1, keepdim=True) + 1e-3)).flatten(-2) * self.weight


class Inner(nn.Module):
    """x + write(norm(read(x)))."""

    def __init__(self, norm: type[nn.Module]) -> None:
        super().__init__()
        self.pre, self.norm = nn.RMSNorm(WIDTH, eps=1e-6), norm()
        self.read, self.write = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y = self.read(self.pre(x))
        y = self.norm(y if isinstance(self.norm, Splitting) else y.unflatten(-1, (-1, HEAD)))
        out: Tensor = x + self.write(y.reshape(x.shape))
        return out


class Pre(nn.Module):
    """x + read(norm(x))."""

    def __init__(self, norm: type[nn.Module]) -> None:
        super().__init__()
        self.norm, self.read = norm(), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.read(self.norm(x))
        return out


def stack(block: type[nn.Module], norm: type[nn.Module]) -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    return shuffled(nn.Sequential(block(norm), block(norm))), torch.randn(2, 5, WIDTH)


WHY = {
    Joining: "it is given the shape (2, 5, 4, 8) and returns (2, 5, 32)",
    Back: "0.norm.weight has the shape (32,), which does not fit what it is given, (2, 5, 4, 8)",
    Splitting: "its statistic runs over 8 of the 32 features that it is given",
}


@pytest.mark.parametrize("norm", WHY)
def test_eps_is_not_moved_there(norm: type[nn.Module]) -> None:
    found = SetEps(only="?.norm").sites(Survey.of(*stack(Inner, norm)))
    assert not found.sites
    assert [each.path for each in found.refused] == ["0.norm", "1.norm"]
    assert found.refused[0].why.startswith(WHY[norm])


@pytest.mark.parametrize("rewrite", [FuseNorms(), StoreGains("one_plus_weight"), ToDyT()], ids=lambda each: each.name)
def test_no_closed_form_is_laid_over_a_norm_over_heads(rewrite: Rewrite) -> None:
    found = rewrite.sites(Survey.of(*stack(Pre, Inside)))
    assert not found.sites
    assert {each.why for each in found.refused} == {WHY[Splitting]}


def test_the_other_norms_change_all_the_same() -> None:
    model, x = stack(Inner, Joining)
    kept, before = snapshot(model), outputs(model, x)
    plan = make_plan(model, [StoreGains("one_plus_weight")], x).apply()
    assert [site.path for site in plan.steps[0][1].sites] == ["0.pre", "1.pre"]
    assert torch.allclose(outputs(model, x), before, atol=1e-5)
    plan.undo()
    assert snapshot(model) == kept
