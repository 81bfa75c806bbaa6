"""Which computed weights are reparametrised ones, and of which kind."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations

from tests.anatomy.reading import anatomy_of

WIDTH = 8


class Standardised(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        weight = F.batch_norm(self.weight.reshape(1, self.out_features, -1), None, None, training=True)
        return F.linear(x, weight.reshape_as(self.weight), self.bias)


@pytest.mark.parametrize(
    ("make", "kind"),
    [
        (lambda: parametrizations.spectral_norm(nn.Linear(WIDTH, 12)), "spectral_norm"),
        (lambda: parametrizations.weight_norm(nn.Linear(WIDTH, 12)), "weight_norm"),
        (lambda: Standardised(WIDTH, 12), "weight_standardization"),
    ],
)
def test_kind_of_a_linear_layer(make: Callable[[], nn.Module], kind: str) -> None:
    found = anatomy_of(nn.Sequential(make()), torch.randn(2, 3, WIDTH)).reparametrizations
    assert [(r.path, r.kind) for r in found] == [("0", kind)]


@pytest.mark.parametrize("axis", [0, 1])
def test_slices_of_one_element_are_no_standardised_ones(axis: int) -> None:
    """Such a slice over its length is a sign, which a shift that leaves the signs does not change."""
    shape = (1, 12) if axis == 0 else (12, 1)
    model = nn.Sequential(nn.Linear(WIDTH, shape[0]), parametrizations.weight_norm(nn.Linear(*shape), dim=axis))
    for seed in range(4):
        torch.manual_seed(seed)
        nn.init.normal_(model[1].parametrizations.weight.original1)
        found = anatomy_of(model, torch.randn(2, 3, WIDTH)).reparametrizations
        assert [(r.path, r.kind) for r in found] == [("1", "weight_norm")]


class Latents(nn.Module):
    """Attention whose queries come from normed parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.latents, self.norm = nn.Parameter(torch.randn(6, WIDTH)), nn.LayerNorm(WIDTH)
        self.q, self.k = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k = self.q(self.norm(self.latents)).expand(len(x), -1, -1), self.k(x)
        return (q @ k.mT).softmax(-1) @ k


class Joined(nn.Module):
    """A weight put together from two, one of which is empty."""

    def __init__(self) -> None:
        super().__init__()
        self.tied, self.rest = nn.Parameter(torch.randn(WIDTH, 5)), nn.Parameter(torch.randn(0, 5))

    def forward(self, x: Tensor) -> Tensor:
        return x @ torch.cat([self.tied, self.rest])


@pytest.mark.parametrize("make", [Latents, Joined])
def test_other_computed_operands_are_none(make: Callable[[], nn.Module]) -> None:
    assert anatomy_of(make(), torch.randn(2, 6, WIDTH)).reparametrizations == ()


class Written(nn.Module):
    """g · v / divisor(‖v‖) by a rule of its own; v as [in, out] where `turned`."""

    def __init__(self, rule: Callable[[Tensor], Tensor], turned: bool = False) -> None:
        super().__init__()
        self.v = nn.Parameter(torch.randn(WIDTH, 12) if turned else torch.randn(12, WIDTH))
        self.g = nn.Parameter(torch.ones(12))
        self.rule, self.turned = rule, turned

    def forward(self, x: Tensor) -> Tensor:
        v = self.v.T if self.turned else self.v
        return F.linear(x, self.g[:, None] * v / self.rule(v.norm(dim=1, keepdim=True)))


class Filters(nn.Conv2d):
    """Standardised filters with an eps inside the root."""

    def forward(self, x: Tensor) -> Tensor:
        variance, mean = torch.var_mean(self.weight, (1, 2, 3), keepdim=True, correction=0)
        return F.conv2d(x, (self.weight - mean) / (variance + 1e-4).sqrt(), self.bias)


VECTORS, MAPS = (2, 3, WIDTH), (2, 3, WIDTH, WIDTH)


@pytest.mark.parametrize(
    ("make", "shape", "parameter", "gain", "axes", "floor", "zeros"),
    [
        (lambda: Written(lambda n: n), VECTORS, "v", "g", (1,), None, False),
        (lambda: Written(lambda n: n, turned=True), VECTORS, "v", "g", (0,), None, False),
        (lambda: Written(lambda n: n + 1e-5), VECTORS, "v", "g", (1,), 1e-5, True),
        (lambda: Written(lambda n: (n**2 + 1e-6).sqrt()), VECTORS, "v", "g", (1,), 1e-3, True),
        (lambda: Written(lambda n: n.clamp_min(1e-4)), VECTORS, "v", "g", (1,), 1e-4, True),
        (lambda: Written(lambda n: torch.where(n > 0, n, 1.0)), VECTORS, "v", "g", (1,), None, True),
        (lambda: Filters(3, 4, 3), MAPS, "weight", None, (1, 2, 3), 1e-2, True),
        (
            lambda: parametrizations.spectral_norm(nn.Linear(WIDTH, 12)),
            VECTORS,
            "parametrizations.weight.original",
            None,
            (0, 1),
            None,
            False,
        ),
    ],
)
def test_what_a_computed_weight_is_made_from(
    make: Callable[[], nn.Module],
    shape: tuple[int, ...],
    parameter: str,
    gain: str | None,
    axes: tuple[int, ...],
    floor: float | None,
    zeros: bool,
) -> None:
    (found,) = anatomy_of(nn.Sequential(make()), torch.randn(shape)).reparametrizations
    assert (found.path, found.parameter) == ("0", f"0.{parameter}")
    assert found.gain == (None if gain is None else f"0.{gain}")
    assert (found.axes, found.zeros) == (axes, zeros)
    assert found.floor == (None if floor is None else pytest.approx(floor, rel=1e-6))


def test_weights_of_one_recipe_keep_their_own_names_and_others_their_own_eps() -> None:
    rules: list[Callable[[Tensor], Tensor]] = [lambda n: n, lambda n: n, lambda n: n + 1e-5, lambda n: n + 1e-4]
    layers = [layer for rule in rules for layer in (Written(rule), nn.Linear(12, WIDTH))]
    found = anatomy_of(nn.Sequential(*layers), torch.randn(VECTORS)).reparametrizations
    assert [(r.parameter, r.gain) for r in found] == [(f"{2 * i}.v", f"{2 * i}.g") for i in range(4)]
    assert [r.floor for r in found] == [None, None, pytest.approx(1e-5), pytest.approx(1e-4)]


class Both(nn.Module):
    """Two computed weights in one module, and a parametrised module that does not run."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Parameter(torch.randn(12, WIDTH)), nn.Parameter(torch.randn(4, 12))
        self.idle = parametrizations.weight_norm(nn.Linear(WIDTH, 3))

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(F.linear(x, F.normalize(self.a, dim=1, eps=1e-8)), F.normalize(self.b, dim=1, eps=1e-8))


def test_several_in_one_module_and_those_that_do_not_run() -> None:
    found = anatomy_of(Both(), torch.randn(VECTORS)).reparametrizations
    assert [(r.path, r.parameter, r.gain) for r in found] == [
        (".", "a", None),
        (".", "b", None),
        ("idle", "idle.parametrizations.weight.original1", "idle.parametrizations.weight.original0"),
    ]
    assert [r.floor for r in found] == [pytest.approx(1e-8), pytest.approx(1e-8), None]
