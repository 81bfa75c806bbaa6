"""What a proof says where it cannot tell: outputs without a finite number, and a wider copy that does not run."""

from __future__ import annotations

from math import isnan

import pytest
import torch
from torch import Tensor, nn

from normprobe.records import Anatomy
from normprobe.rewrites import make_plan
from normprobe.rewrites.base import Effect
from normprobe.rewrites.distance import distance
from normprobe.rewrites.proof import Baseline, Proof
from tests.rewrites.cases import Scaled


class Gives(nn.Module):
    """Its input times a factor; two outputs."""

    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.tensor(factor))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x * self.factor, x[0] * self.factor


@pytest.mark.parametrize("effect", [Effect.EXACT, Effect.BREAKING])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_nothing_is_told_of_outputs_that_are_finite_nowhere(effect: Effect, value: float) -> None:
    model, x = Gives(value), torch.ones(3, 4)
    proof = Baseline.of(model, x, effect, Anatomy()).compare(model, x)
    told = "nothing can be told: all 16 values are NaN or infinite, before and after alike; other inputs may tell more"
    assert str(proof) == told
    assert (isnan(proof.max_abs), isnan(proof.max_rel), proof.holds, proof.tolerance) == (True, True, None, None)
    again = Proof.model_validate_json(proof.model_dump_json())
    assert str(again) == told


def test_one_finite_number_is_something_to_tell() -> None:
    nan = torch.full((3,), torch.nan)
    some = torch.tensor([torch.nan, 1.0, torch.inf])
    assert isnan(distance([nan, nan], [nan, nan]))
    assert [distance([nan, some], [nan, some]), distance([some, nan], [some, nan])] == [0.0, 0.0]
    assert [distance([nan], [some]), distance([nan], [torch.full((3,), torch.inf)])] == [torch.inf] * 2


class Fixed(nn.Module):
    """Multiplies with a matrix that is float32 whatever its input is."""

    def __init__(self) -> None:
        super().__init__()
        self.read = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.read(x) @ torch.eye(4)


class Checks(Fixed):
    """Refuses what is not float32 itself."""

    def forward(self, x: Tensor) -> Tensor:
        if x.dtype is not torch.float32:
            raise TypeError("a long story\nover two lines")
        return super().forward(x)


@pytest.mark.parametrize(
    ("kind", "why"),
    [
        (Fixed, "aten.mm does not run in float64"),
        (Checks, "the code of the model does not run (TypeError) in float64"),
    ],
)
def test_what_does_not_run_in_a_wider_dtype_is_named(kind: type[nn.Module], why: str) -> None:
    plan = make_plan(kind(), [Scaled(1.0, ("read",))], torch.randn(3, 4)).apply()
    assert plan.proof is not None
    assert plan.proof.tolerance_source.endswith(f"; no wider copy runs: {why}")


def test_a_model_on_several_devices_has_no_wider_copy() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4, device="meta"))
    model.forward = lambda x: model[0](x)  # type: ignore[method-assign]
    found = Baseline.of(model, torch.randn(3, 4), Effect.EXACT, Anatomy())
    assert found.why_not_wide == "no wider copy runs: parameters lie on 2 devices"
