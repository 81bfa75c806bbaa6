"""NP801 to NP804 on small networks: planted faults are found, sound ones give nothing."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations

import normprobe
from normprobe.records import Finding, Reparametrization, Severity
from tests.checks.norm_free import networks as n

CODES = ("NP801", "NP802", "NP803", "NP804")


def findings(model: nn.Module, inputs: Any, code: str, level: Any = "forward") -> list[Finding]:
    return [one for one in normprobe.probe(model.eval(), inputs, level=level).findings if one.code == code]


def seeded(make: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return make()


def image() -> Tensor:
    return torch.randn(n.IMAGE, generator=torch.Generator().manual_seed(1))


def vector() -> Tensor:
    return torch.randn(64, 8, generator=torch.Generator().manual_seed(1))


def sound() -> Tensor:
    return torch.randn(2, 4, 40, generator=torch.Generator().manual_seed(1))


def tokens() -> Tensor:
    return torch.arange(40).reshape(2, 20) % 32


NORMED: dict[str, tuple[Callable[[], nn.Module], Callable[[], Tensor]]] = {
    "vocoder": (n.Vocoder, sound),
    "inline": (n.perceptron, vector),
    "spectral": (n.discriminator, image),
    "linear": (lambda: nn.Sequential(parametrizations.weight_norm(nn.Linear(8, 4)), nn.Linear(4, 2)), vector),
}
SOUND = NORMED | {
    "free": (n.Free, image),
    "free, alpha 1": (partial(n.Free, 1.0), image),
    "held": (n.Held, vector),
    "dyt": (partial(n.Transformer, n.Bent), tokens),
    "written": (n.Written, vector),
    "softsign": (partial(n.Transformer, n.Softsign), tokens),
}


@pytest.mark.parametrize("name", SOUND)
@pytest.mark.parametrize("level", ["structure", "forward"])
def test_sound_networks_give_nothing(name: str, level: str) -> None:
    make, inputs = SOUND[name]
    report = normprobe.probe(seeded(make).eval(), inputs(), level=level)
    assert [(f.code, f.where, f.message) for f in report.findings if f.code in CODES] == []
    if level == "forward":
        missed = {one.why for one in report.skipped if one.what.startswith(CODES)}
        assert missed <= {"no norm was found", "no residual stream was found"}


def last_followed(model: nn.Module, x: Tensor) -> tuple[Reparametrization, Tensor]:
    """The last computed weight of the model, and what it follows."""
    one = normprobe.probe(model, x, level="structure").anatomy.reparametrizations[-1]
    return one, dict(model.named_parameters())[one.parameter].data


@pytest.mark.parametrize("name", NORMED)
@pytest.mark.parametrize("level", ["structure", "forward"])
def test_np801_a_weight_of_zeros(name: str, level: str) -> None:
    make, inputs = NORMED[name]
    model, x = seeded(make).eval(), inputs()
    one, v = last_followed(model, x)
    slice_of(one, v, 0).zero_()
    (found,) = findings(model, x, "NP801", level)
    assert (found.where, found.severity) == (one.path, Severity.ERROR)
    if level == "forward":  # what it says of NaN is so
        with torch.no_grad():
            assert not model(x).isfinite().all()


def slice_of(one: Reparametrization, v: Tensor, index: int) -> Tensor:
    """One slice of what a computed weight follows; all of it where that is one slice."""
    others = [i for i in range(v.dim()) if i not in one.axes]
    return v.select(others[0], index) if others else v


def test_np801_with_an_eps_is_a_warning() -> None:
    for fill, word in ((0.0, "divided by 0.001"), (1e-5, "below the eps")):
        model = seeded(partial(n.perceptron, 1e-3)).eval()
        model[0].direction.data[3] = fill
        (found,) = findings(model, vector(), "NP801")
        assert (found.where, found.severity) == ("0", Severity.WARNING)
        assert word in found.message


def test_np801_gains_of_zero() -> None:
    model, x = seeded(n.Vocoder).eval(), sound()
    gains = dict(model.named_parameters())
    gains["last.parametrizations.weight.original0"].data.zero_()  # 1 output: nothing is left
    gains["first.parametrizations.weight.original0"].data[:2] = 0  # 2 of 8
    for name, gain in gains.items():
        if name.startswith("blocks") and name.endswith("original0"):
            gain.data.zero_()  # every branch starts closed
    found = {one.where: one.severity for one in findings(model, x, "NP801")}
    assert found == {"last": Severity.WARNING, "first": Severity.NOTE}


STANDARD: dict[str, tuple[Callable[[], nn.Module], Callable[[], Tensor], str]] = {
    "free": (n.Free, image, "blocks.1.first"),
    "stem": (n.Free, image, "stem"),
    "plain": (lambda: nn.Sequential(n.Filters(3, 8), nn.ReLU(), n.Filters(8, 4)), image, "2"),
}


@pytest.mark.parametrize("name", STANDARD)
@pytest.mark.parametrize("level", ["structure", "forward"])
def test_np804_a_filter_without_variance(name: str, level: str) -> None:
    make, inputs, path = STANDARD[name]
    model = seeded(make).eval()
    filters = model.get_submodule(path)
    filters.weight.data[1] = 0.1
    (found,) = findings(model, inputs(), "NP804", level)
    assert (found.where, found.severity) == (path, Severity.WARNING)
    assert "in 1 of" in found.message
    with torch.no_grad():  # nothing is left of it
        assert filters(torch.randn(1, filters.in_channels, 8, 8))[:, 1].std() < 1e-6


def test_np804_without_an_eps_it_is_nan() -> None:
    model = seeded(lambda: nn.Sequential(n.Filters(3, 8, eps=0.0), nn.ReLU())).eval()
    model[0].weight.data[1] = 0.0
    (found,) = findings(model, image(), "NP804")
    assert found.severity is Severity.ERROR
    with torch.no_grad():
        assert not model(image()).isfinite().all()


def test_np804_filters_that_are_smaller_than_eps() -> None:
    model = seeded(n.Free).eval()
    model.blocks[1].first.weight.data.mul_(1e-5)
    (found,) = findings(model, image(), "NP804")
    assert "below the eps" in found.message


def test_np804_branches_may_start_closed() -> None:
    model = seeded(n.Free).eval()
    for block in model.blocks:
        block.second.weight.data.zero_()
    assert findings(model, image(), "NP804") == []
    model.stem.weight.data.zero_()
    assert [one.where for one in findings(model, image(), "NP804")] == ["stem"]


@pytest.mark.parametrize("norm", [n.Bent, n.Softsign])
@pytest.mark.parametrize(
    ("alpha", "expected"), [(100.0, Severity.WARNING), (1e-2, Severity.NOTE), (1e-4, Severity.WARNING)]
)
def test_np802_slopes_far_from_the_input(norm: type[nn.Module], alpha: float, expected: Severity) -> None:
    if norm is n.Softsign and alpha == 100.0:
        alpha = 1e4  # it bends more slowly
    model = seeded(lambda: n.Transformer(partial(norm, alpha=alpha)))
    found = findings(model, tokens(), "NP802")
    places = {place for one in found for place in one.every_place}
    assert places >= {"blocks.0.norm1", "blocks.1.norm2"}
    assert {one.severity for one in found} == {expected}


def test_np802_one_slope_that_is_off_and_one_that_is_zero() -> None:
    model = seeded(lambda: n.Transformer(n.Bent))
    model.blocks[1].norm1.alpha.data.fill_(60.0)
    model.norm.alpha.data.zero_()
    found = {one.where: one.severity for one in findings(model, tokens(), "NP802")}
    assert found == {"blocks.1.norm1": Severity.WARNING, "norm": Severity.ERROR}


@pytest.mark.parametrize(
    ("alpha", "expected"), [(100.0, Severity.WARNING), (1e-2, Severity.NOTE), (0.0, Severity.ERROR)]
)
def test_np802_maps_that_are_written_out(alpha: float, expected: Severity) -> None:
    (found,) = findings(seeded(partial(n.Written, alpha)), vector(), "NP802")
    assert (found.severity, len(found.every_place)) == (expected, 3)


def test_np802_small_embeddings_are_noted() -> None:
    model = seeded(lambda: n.Transformer(n.Bent, size=0.02))
    assert {one.severity for one in findings(model, tokens(), "NP802")} == {Severity.NOTE}


@pytest.mark.parametrize(
    ("make", "inputs", "where"),
    [
        (partial(n.Free, beta={1: 10.0}), image, {"blocks.1"}),
        (partial(n.Free, beta={1: 0.1}), image, {"blocks.1"}),
        (partial(n.Free, beta={4: 10.0}), image, {"blocks.4"}),
        (partial(n.Free, beta=dict.fromkeys(range(6), 10.0)), image, {f"blocks.{i}" for i in range(6)}),
        (partial(n.Free, beta=dict.fromkeys(range(6), 0.125)), image, {f"blocks.{i}" for i in range(6)}),
        (partial(n.Held, 0.5, 10.0), vector, set()),
        (partial(n.Held, 0.5, 0.05), vector, set()),
    ],
)
def test_np803_constants_that_are_off(
    make: Callable[[], nn.Module], inputs: Callable[[], Tensor], where: set[str]
) -> None:
    found = findings(seeded(make), inputs(), "NP803")
    assert found
    assert {one.severity for one in found} == {Severity.WARNING}
    assert {place for one in found for place in one.every_place} >= where


def test_np803_a_factor_on_the_branch_that_is_off() -> None:
    model = seeded(n.Free)
    for block in model.blocks:
        block.alpha = 10.0
    assert len(findings(model, image(), "NP803")) == 1
