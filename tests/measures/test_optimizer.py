"""What an optimiser does to norms: steps of copies against closed forms, and no trace in the original."""

from __future__ import annotations

import copy
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW, Optimizer

import normprobe
from normprobe.errors import SettingError
from normprobe.measures.optimizer_trial import lost
from normprobe.records.optimizer import OptimizerMeasure
from tests.norms import zoo

X = torch.randn(3, 32, generator=torch.Generator().manual_seed(0))


def net(dtype: torch.dtype = torch.float32) -> nn.Module:
    return nn.Sequential(nn.LayerNorm(32), nn.Linear(32, 32), zoo.RMSNorm(one_plus=True)).to(dtype)


def measured(model: nn.Module, optimizer: Optimizer) -> OptimizerMeasure:
    dtype = next(model.parameters()).dtype
    found = normprobe.probe(model, X.to(dtype), level="structure", optimizer=optimizer).measurements.optimizer
    assert found is not None
    return found


@pytest.mark.parametrize(
    ("make", "decay", "step"),
    [
        (lambda p: AdamW(p, lr=1e-2, weight_decay=0.1), 1e-3, 1e-2),
        (lambda p: AdamW(p, lr=1e-2, weight_decay=0.0), 0.0, 1e-2),
        (lambda p: Adam(p, lr=1e-2, weight_decay=0.1), 1e-2, 1e-2),  # decay goes through Adam's own scale
        (lambda p: Adam(p, lr=torch.tensor(1e-2)), 0.0, 1e-2),
        (lambda p: SGD(p, lr=1e-2, weight_decay=0.1, momentum=0.9), 1e-3, None),
        (lambda p: torch.optim.Adafactor(p, lr=1e-2, weight_decay=0.0), 0.0, 1e-2),
    ],
)
def test_decay_and_step_are_those_of_the_closed_form(
    make: Callable[[Any], Optimizer], decay: float, step: float | None
) -> None:
    model = net()
    (group,) = measured(model, make(model.parameters())).groups
    assert group.decay == pytest.approx(decay, rel=1e-3, abs=1e-9)
    assert group.step == (None if step is None else pytest.approx(step, rel=1e-3))
    assert (group.reason == "") == (step is not None)


def test_a_schedule_is_taken_at_its_full_rate() -> None:
    model = net()
    optimizer = AdamW(model.parameters(), lr=1e-2)
    torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.0)
    assert optimizer.param_groups[0]["lr"] == 0.0
    (group,) = measured(model, optimizer).groups
    assert (group.lr, group.step) == (1e-2, pytest.approx(1e-2, rel=1e-3))


def test_the_optimiser_is_left_as_it_is() -> None:
    model = net()
    optimizer = AdamW(model.parameters(), lr=1e-2)
    model(X).sum().backward()
    optimizer.step()
    told: list[str] = []
    optimizer.register_step_pre_hook(lambda *_: told.append("hook"))
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    before = copy.deepcopy(optimizer.state_dict()), [p.detach().clone() for p in model.parameters()]
    measured(model, optimizer)
    state, parameters = before
    assert str(optimizer.state_dict()) == str(state)
    assert all(torch.equal(a, b) for a, b in zip(parameters, model.parameters(), strict=True))
    assert told == []
    assert scheduler.last_epoch == 0
    assert len(optimizer.state) == 5


def test_norms_are_told_apart_by_group() -> None:
    model = net()
    first, linear, second = model.children()
    optimizer = AdamW([{"params": linear.parameters()}, {"params": [first.weight, second.weight], "weight_decay": 0}])
    first.bias.requires_grad_(False)
    found = measured(model, optimizer)
    assert [(n.path, n.part, n.group, n.one_plus) for n in found.norms] == [
        ("0", "gain", 1, False),
        ("2", "gain", 1, True),
    ]
    assert (found.gains, found.offsets, found.foreign) == (2, 0, 0)
    copies = AdamW([p.detach().clone() for p in model.parameters()])
    found = measured(model, copies)
    assert (found.norms, found.foreign) == ((), 5)


class Compensated(Adam):
    """Adam that keeps in its state what rounding takes."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                held: Tensor = self.state[p].setdefault("exact", p.detach().float().clone())
                held -= group["lr"] * p.grad.sign().float()
                p.data.copy_(held)


def test_steps_are_lost_in_half_precision_unless_the_optimiser_keeps_them() -> None:
    for dtype, kind, expected in (
        (torch.float32, Adam, 0.0),
        (torch.bfloat16, Adam, 1.0),
        (torch.bfloat16, Compensated, 0.0),
    ):
        model = net(dtype)
        found = measured(model, kind(model.parameters(), lr=1e-3))
        assert [n.lost for n in found.norms] == [expected, 0.0, 0.0]  # offset and w are 0
        assert found.norms[0].dtype == str(dtype)[6:]


@pytest.mark.parametrize(("step", "share"), [(0.0019, 0.75), (0.0021, 0.5), (0.0041, 0.25), (0.017, 0.0)])
def test_what_is_lost_by_the_spacing_of_numbers(step: float, share: float) -> None:
    """bfloat16 is 1/256 apart below 1, 1/128 above, 1/32 above 4: half of it is lost."""
    stored = torch.tensor([0.0, 1.0, 1.5, 4.5], dtype=torch.bfloat16)
    assert lost(stored, torch.full((4,), step, dtype=torch.float64)) == share
    still = torch.tensor([step, 0.0, 0.0, 0.0], dtype=torch.float64)  # the others take no step that could be lost
    assert lost(stored, still) == 0


def test_an_optimiser_that_needs_more_is_said_and_none_is_refused() -> None:
    model = net()
    (group,) = measured(model, torch.optim.LBFGS(model.parameters())).groups
    assert (group.step, group.decay) == (None, None)
    assert "does not step: TypeError" in group.reason
    with pytest.raises(SettingError, match="the optimizer is none of torch's"):
        normprobe.probe(model, X, optimizer="adam")  # type: ignore[arg-type]
    assert normprobe.probe(model, X, level="structure").measurements.optimizer is None


class Ahead(Optimizer):
    """Steps another optimiser that it holds, as Lookahead and SAM do."""

    def __init__(self, *held: Optimizer, groups: Any = None) -> None:
        self.held = list(held)
        super().__init__(groups or held[0].param_groups, {})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for one in self.held:
            one.step()


class Elsewhere(Ahead):
    """Holds what it steps where no copy finds it."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.call()


def test_an_optimiser_that_steps_another_is_copied_with_it() -> None:
    model = net()
    model(X).square().sum().backward()
    before = [p.detach().clone() for p in model.parameters()]
    inner = AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)
    (group,) = measured(model, Ahead(inner)).groups
    assert (group.decay, group.step) == (pytest.approx(1e-3, rel=1e-3), pytest.approx(1e-2, rel=1e-3))
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    assert not inner.state


def test_an_optimiser_that_does_not_move_what_it_is_given_is_not_known() -> None:
    model = net()
    away = Elsewhere(AdamW(model.parameters()), groups=[{"params": list(model.parameters())}])
    away.call = AdamW([nn.Parameter(torch.ones(2))]).step
    (group,) = measured(model, away).groups
    assert (group.decay, group.step) == (None, None)
    assert "does not move the parameter" in group.reason
    (idle,) = measured(model, AdamW(model.parameters(), lr=0.0)).groups
    assert (idle.decay, idle.step, idle.reason) == (0.0, None, "its learning rate is 0")


def test_a_model_without_values_has_steps_of_no_size() -> None:
    model = net().to("meta")
    optimizer = AdamW(model.parameters(), lr=1e-2)
    report = normprobe.probe(model, X.to("meta"), level="structure", optimizer=optimizer)
    found = report.measurements.optimizer
    assert found is not None
    assert [n.lost for n in found.norms] == [None] * 3
    assert found.groups[0].step == pytest.approx(1e-2, rel=1e-3)


def followed(optimizer: Callable[[Any], Optimizer], dtype: torch.dtype = torch.bfloat16) -> tuple[Any, Tensor]:
    """The gain of the first norm as the optimiser steps it by the gradient of the mean square, and that gradient."""
    model = net(dtype)
    x = X.to(dtype)
    report = normprobe.probe(
        model, x, level="backward", loss=lambda y, _: y.square().mean(), optimizer=optimizer(model.parameters())
    )
    assert report.measurements.optimizer is not None
    (gradient,) = torch.autograd.grad(model(x).square().mean(), [model[0].weight])
    return report.measurements.optimizer.norms[0], gradient.double().abs()


@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("lr", [0.02, 8.0, 200.0])
def test_a_step_that_follows_the_gradient_is_that_of_the_measured_one(lr: float, momentum: float) -> None:
    found, gradient = followed(lambda p: SGD(p, lr=lr, momentum=momentum, weight_decay=0.1))
    steps = lr * gradient * (1 if momentum == 0 else (1 - momentum**20) / (1 - momentum))
    assert found.step == pytest.approx(float(steps.median()), rel=1e-3)
    below = ((1 - steps).bfloat16() == 1) & ((1 + steps).bfloat16() == 1)
    assert found.lost == pytest.approx(float(below.double().mean()))


def test_gradients_that_differ_lose_a_part_of_their_steps() -> None:
    shares = [followed(lambda p, lr=lr: SGD(p, lr=lr))[0].lost for lr in (0.02, 50.0, 5000.0)]
    assert shares[0] == 1
    assert 0 < shares[1] < 1
    assert shares[2] < 0.1


def test_without_a_gradient_such_a_step_has_no_size() -> None:
    model = net(torch.bfloat16)
    assert [n.lost for n in measured(model, SGD(model.parameters(), lr=0.1)).norms] == [None] * 3


class CompensatedMomentum(SGD):
    """SGD that keeps in its state what rounding takes."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                state: dict[str, Tensor] = self.state[p]
                held = state.setdefault("exact", p.detach().double())
                speed = state.setdefault("speed", torch.zeros_like(held))
                speed.mul_(0.9).add_(p.grad.double())
                held -= group["lr"] * speed
                p.data.copy_(held)


def test_momentum_does_not_pass_for_an_optimiser_that_keeps_what_rounding_takes() -> None:
    assert followed(lambda p: SGD(p, lr=0.02, momentum=0.9))[0].lost > 0.5
    assert followed(lambda p: CompensatedMomentum(p, lr=0.02))[0].lost == 0


class Away(Optimizer):
    """Steps another optimiser that it holds where no copy replaces it: a dictionary, an object, a function."""

    def __init__(self, inner: Optimizer, where: str) -> None:
        super().__init__(inner.param_groups, {})
        held = {"dict": {"it": inner}, "object": SimpleNamespace(it=inner), "call": inner.step}
        self.inner: Any = held[where]
        self.where = where

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        if self.where == "call":
            self.inner()
        else:
            (self.inner["it"] if self.where == "dict" else self.inner.it).step()


@pytest.mark.parametrize("where", ["dict", "object", "call"])
def test_an_optimiser_that_is_stepped_from_anywhere_moves_nothing(where: str) -> None:
    model = net()
    inner = SGD(model.parameters(), lr=1e-2, momentum=0.9)
    model(X).square().sum().backward()
    inner.step()
    gradients = [p.grad for p in model.parameters()]
    before, state = [p.detach().clone() for p in model.parameters()], copy.deepcopy(inner.state_dict())
    (group,) = measured(model, Away(inner, where)).groups
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    assert all(p.grad is gradient for p, gradient in zip(model.parameters(), gradients, strict=True))
    assert str(inner.state_dict()) == str(state)
    assert (group.decay, group.step) == (None, None)
    assert "does not move the parameter" in group.reason


class Averaging(SGD):
    """Pulls what it was made for, whatever it is given, to an average of its own."""

    def __init__(self, parameters: Any, lr: float) -> None:
        super().__init__(parameters, lr=lr)
        self.slow = [p.detach().clone() for group in self.param_groups for p in group["params"]]
        self.fast = [p for group in self.param_groups for p in group["params"]]
        self.count = [0]

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step()
        self.count[0] += 1
        for slow, fast in zip(self.slow, self.fast, strict=True):
            slow.add_(1.0)
            fast.data.lerp_(slow, 0.5)


def test_what_an_optimiser_writes_without_a_gradient_is_undone() -> None:
    model = net()
    optimizer = Averaging(model.parameters(), lr=1e-2)
    before, slow = [p.detach().clone() for p in model.parameters()], [t.clone() for t in optimizer.slow]
    measured(model, optimizer)
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    assert all(torch.equal(a, b) for a, b in zip(slow, optimizer.slow, strict=True))
    assert optimizer.count == [0]
