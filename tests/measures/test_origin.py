"""The operation that made the first value or gradient that is not finite."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from normprobe import probe
from normprobe.measures.forward import measure_forward
from normprobe.measures.gradients import measure_gradients
from normprobe.measures.origin import first_broken_gradient, first_broken_operation
from normprobe.records import Anatomy, OpSite
from tests.measures.models import anatomy_of
from tests.models import decoder
from tests.trace import Snapshot


class Dividing(nn.Module):
    """Divides 0 by 0 in the second division of its forward, behind a mask of −∞; returns it inside a dictionary."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> dict[str, Any]:
        mask = torch.full((5, 8), -math.inf).triu(1)
        weights = (self.first(x) / 2 + mask).softmax(-1)
        zero = weights - weights
        return {"parts": [self.second(x), {"last": zero / zero}]}


def test_a_division_is_named_with_its_place() -> None:
    model, x = nn.Sequential(nn.Linear(8, 8), Dividing()), torch.randn(1, 5, 8)
    found, _ = measure_forward(model, x, Anatomy())
    assert found.first_non_finite == "1"
    assert found.first_non_finite_operation is not None
    assert found.first_non_finite_operation.direction == "forward"
    assert found.first_non_finite_operation.site == OpSite(path="1", op="aten.div.Tensor", ordinal=1)


class Adding(nn.Module):
    """The sum overflows in half precision though both of its sides fit."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return x + (self.linear(x) * 0 + 60000)


def test_an_add_that_overflows_half_precision_is_named() -> None:
    model, x = nn.Sequential(Adding(), nn.LayerNorm(8)).half(), torch.full((1, 3, 8), 60000.0).half()
    found, _ = measure_forward(model, x, Anatomy())
    assert found.first_non_finite_operation is not None
    assert found.first_non_finite_operation.site == OpSite(path="0", op="aten.add.Tensor", ordinal=1)


def test_a_weight_that_is_nan_was_made_by_no_operation() -> None:
    model, x = nn.Sequential(nn.Linear(8, 8)), torch.randn(2, 8)
    with torch.no_grad():
        model[0].weight[0, 0] = math.nan
    assert first_broken_operation(model, x, "0") is None


def test_finite_models_are_not_looked_at_again() -> None:
    model, ids = decoder("pre")
    found, _ = measure_forward(model, ids, anatomy_of(model, ids))
    assert found.first_non_finite_operation is None
    gradients, _ = measure_gradients(model, ids, anatomy_of(model, ids))
    assert gradients is not None
    assert gradients.first_non_finite is None
    assert first_broken_gradient(model, ids, anatomy_of(model, ids)) is None


class Rooting(nn.Module):
    """√0 is 0, and its derivative is infinite."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        return x + (y - y).sqrt()


def rooted() -> tuple[nn.Module, Tensor]:
    return nn.Sequential(nn.Linear(8, 8), Rooting(), nn.LayerNorm(8)), torch.randn(2, 3, 8)


def test_a_gradient_that_breaks_is_named_by_the_operation_of_the_forward() -> None:
    model, x = rooted()
    found = first_broken_gradient(model, x, Anatomy())
    assert found is not None
    assert found.direction == "backward"
    assert found.operation == "SqrtBackward0"
    assert found.site == OpSite(path="1", op="aten.sqrt.default")


def test_an_operation_of_the_loss_has_no_place_in_the_model() -> None:
    model, x = nn.Sequential(nn.Linear(8, 8)), torch.randn(2, 8)
    found = first_broken_gradient(model, x, Anatomy(), lambda y, inputs: (y - y).sqrt().sum())
    assert found is not None
    assert (found.operation, found.site) == ("SqrtBackward0", None)


def test_the_finding_says_which_operation_it_was() -> None:
    model, x = rooted()
    report = probe(model, x, level="backward")
    (finding,) = [f for f in report.findings if f.name == "non-finite"]
    assert "the backward of SqrtBackward0 in 1 gave the first" in finding.message


@pytest.mark.parametrize("build", [rooted, lambda: (nn.Sequential(Adding()).half(), torch.full((1, 3, 8), 6e4).half())])
def test_looking_leaves_no_trace(build: Any) -> None:
    model, x = build()
    before = Snapshot(model, x)
    probe(model, x, level="backward", loss=lambda y, inputs: F.relu(y).float().square().mean())
    before.assert_kept()


class Twice(nn.Module):
    """Each way gives a gradient of 60000; autograd's sum of both is infinite in half precision."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        return y * 60000 - y * -60000


def test_a_sum_of_gradients_belongs_to_no_operation() -> None:
    model, x = Twice().half(), torch.zeros(1, 4).half()
    with torch.no_grad():
        model.linear.bias.zero_()
    assert first_broken_gradient(model, x, Anatomy(), lambda y, inputs: y.sum()) is None
