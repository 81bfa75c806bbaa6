"""What an optimiser does to norms: steps of copies against closed forms, and no trace in the original."""

from __future__ import annotations

import copy
from collections.abc import Callable
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
    assert lost(torch.tensor([0.0, 1.0, 1.5, 4.5], dtype=torch.bfloat16), step) == share


def test_an_optimiser_that_needs_more_is_said_and_none_is_refused() -> None:
    model = net()
    (group,) = measured(model, torch.optim.LBFGS(model.parameters())).groups
    assert (group.step, group.decay) == (None, None)
    assert "does not step: TypeError" in group.reason
    with pytest.raises(SettingError, match="the optimizer is none of torch's"):
        normprobe.probe(model, X, optimizer="adam")  # type: ignore[arg-type]
    assert normprobe.probe(model, X, level="structure").measurements.optimizer is None


def test_a_model_without_values_has_steps_of_no_size() -> None:
    model = net().to("meta")
    optimizer = AdamW(model.parameters(), lr=1e-2)
    report = normprobe.probe(model, X.to("meta"), level="structure", optimizer=optimizer)
    found = report.measurements.optimizer
    assert found is not None
    assert [n.lost for n in found.norms] == [None] * 3
    assert found.groups[0].step == pytest.approx(1e-2, rel=1e-3)
