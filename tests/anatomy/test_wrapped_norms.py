"""Norms inside modules that add something to them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrize

from tests.anatomy.reading import anatomy_of, only_stream
from tests.models import WIDTH, decoder


class Gained(nn.Module):
    """A norm without gain, multiplied by a gain of this module."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.gain = nn.LayerNorm(WIDTH, elementwise_affine=False), nn.Parameter(torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x) * (1 + self.gain)


class Dropped(nn.Module):
    """A norm and nothing else of effect."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.drop = nn.LayerNorm(WIDTH), nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        return self.drop(self.inner(x))


def test_a_module_that_adds_the_gain_is_the_norm() -> None:
    found = anatomy_of(*decoder("pre", norm=Gained))
    assert {n.path.rpartition(".")[2] for n in found.norms} == {"norm", "final"}
    assert {(n.affine, n.weight == f"{n.path}.gain") for n in found.norms} == {("one_plus_weight", True)}
    assert found.streams[0].final_norm == "final"


def test_a_module_that_adds_nothing_is_not_listed() -> None:
    found = anatomy_of(*decoder("pre", norm=Dropped))
    assert {n.path.rpartition(".")[2] for n in found.norms} == {"inner"}
    assert found.streams[0].final_norm == "final.inner"


class AddedNorm(nn.Module):
    """Adds the branch to the stream and norms the sum; returns both, the norm first or last."""

    def __init__(self, first: bool) -> None:
        super().__init__()
        self.first, self.weight = first, nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor, stream: Tensor) -> tuple[Tensor, Tensor]:
        stream = x + stream
        normed = stream * torch.rsqrt(stream.pow(2).mean(-1, keepdim=True) + 1e-4) * self.weight
        return (normed, stream) if self.first else (stream, normed)


class Passing(nn.Module):
    """A decoder whose blocks pass on a branch that is not added yet, beside the stream."""

    def __init__(self, first: bool) -> None:
        super().__init__()
        self.embed, self.first = nn.Linear(WIDTH, WIDTH), first
        self.norms, self.writes = nn.ModuleList(), nn.ModuleList()
        for _ in range(4):
            self.norms.append(AddedNorm(first))
            self.writes.append(nn.Linear(WIDTH, WIDTH))
        self.final, self.head = AddedNorm(first), nn.Linear(WIDTH, 5)

    def forward(self, x: Tensor) -> Tensor:
        stream, branch = self.embed(x), torch.zeros_like(x)
        for norm, write in zip(self.norms, self.writes, strict=True):
            normed, stream = norm(branch, stream)[:: 1 if self.first else -1]
            branch = write(normed)
        return self.head(self.final(branch, stream)[0 if self.first else 1])


@pytest.mark.parametrize("first", [True, False])
def test_a_norm_that_adds_and_returns_the_sum_is_a_module(first: bool) -> None:
    found = anatomy_of(Passing(first), torch.randn(2, 3, WIDTH))
    assert [n.path for n in found.norms] == [*[f"norms.{i}" for i in range(4)], "final"]
    assert {(n.kind, n.affine, n.eps, n.module) for n in found.norms} == {("rmsnorm", "weight", 1e-4, True)}
    stream = only_stream(found)
    assert [b.placement for b in stream.branches] == ["pre"] * 4
    assert stream.final_norm == "final"


class Unit(nn.Module):
    """Each row of a weight divided by its length."""

    def forward(self, weight: Tensor) -> Tensor:
        return weight / weight.norm(dim=-1, keepdim=True)


def test_a_norm_of_a_weight_is_a_reparametrization() -> None:
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH))
    parametrize.register_parametrization(model[0], "weight", Unit())
    found = anatomy_of(model, torch.randn(2, 3, WIDTH))
    assert [n.path for n in found.norms] == ["1"]
    assert [(r.path, r.kind) for r in found.reparametrizations] == [("0", "weight_norm")]


class Activated(nn.BatchNorm2d):
    """A batch norm, then an activation that is written out or not marked as pointwise."""

    def __init__(self, activation: Callable[[Tensor], Tensor]) -> None:
        super().__init__(4)
        self.activation = activation

    def forward(self, x: Tensor) -> Tensor:
        return self.activation(super().forward(x))


@pytest.mark.parametrize(
    "activation",
    [lambda x: x * F.relu6(x + 3) / 6, lambda x: x * torch.sigmoid(x), lambda x: F.hardswish(x, inplace=True)],
)
def test_an_activation_in_the_norms_module(activation: Callable[[Tensor], Tensor]) -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 1), Activated(activation), nn.Conv2d(4, 2, 1))
    found = anatomy_of(model, torch.randn(2, 3, 5, 5))
    assert [(n.path, n.module, n.kind, n.frozen) for n in found.norms] == [("1", True, "batchnorm", False)]


class WithRoot(nn.Module):
    """Returns its normed input and what it was divided by."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        root = (x.square().mean(-1, keepdim=True) + 1e-5).sqrt()
        return x / root * self.weight, root


class OnlyNormed(nn.Linear):
    """Uses a norm that returns more."""

    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH)
        self.norm = WithRoot()

    def forward(self, x: Tensor) -> Tensor:
        return x + super().forward(self.norm(x)[0])


def test_a_norm_may_return_its_statistic_as_well() -> None:
    model = nn.Sequential(nn.Linear(4, WIDTH), OnlyNormed(), OnlyNormed())
    found = anatomy_of(model, torch.randn(2, 3, 4))
    assert [(n.path, n.kind, n.eps, n.role) for n in found.norms] == [
        ("1.norm", "rmsnorm", 1e-5, "pre"),
        ("2.norm", "rmsnorm", 1e-5, "pre"),
    ]
