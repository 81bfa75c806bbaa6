"""How far bounded maps are driven into their bend, against float64."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

import normprobe
from normprobe.records import BoundedNorm
from tests.checks.norm_free.networks import Bent, Softsign
from tests.norms import zoo

WIDTH = 16


def measured(model: nn.Module, x: Tensor) -> tuple[BoundedNorm, ...]:
    return normprobe.probe(model.eval(), x).measurements.bounded_norms


def inputs(scale: float = 1.0) -> Tensor:
    return scale * torch.randn(4, 9, WIDTH, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize(("norm", "bends"), [(Bent, torch.tanh), (Softsign, nn.functional.softsign)])
@pytest.mark.parametrize(("alpha", "scale"), [(0.5, 1.0), (4.0, 3.0), (1e-3, 0.1)])
def test_numbers_are_those_of_a_reference(norm: type[nn.Module], bends: object, alpha: float, scale: float) -> None:
    bent = norm(WIDTH, alpha)
    for parameter in (p for p in bent.parameters() if p.dim()):
        parameter.data += 0.0 if norm is Softsign else 0.5 * torch.rand(WIDTH)  # gain and offset come off again
    x = inputs(scale)
    (found,) = measured(nn.Sequential(bent, nn.Linear(WIDTH, 4)), x)
    z = bends(alpha * x.double())  # type: ignore[operator]
    assert found.path == "0"
    assert found.input_rms == pytest.approx(float(x.square().mean().sqrt()), rel=1e-5)
    assert found.output_rms == pytest.approx(float(z.square().mean().sqrt()), rel=1e-4)
    assert found.saturated == pytest.approx(float((z.abs() > 0.99).double().mean()), abs=0.01)
    assert (found.basis.count, found.basis.exact) == (x.numel(), True)


def test_all_executions_count_and_padding_does_not() -> None:
    bent = Bent(WIDTH)
    (found,) = measured(nn.Sequential(bent, nn.Linear(WIDTH, WIDTH), bent), inputs())
    assert found.basis.count == 2 * inputs().numel()


class Written(nn.Module):
    """A bounded map in a forward of more than that, read twice; `place` writes over its input."""

    def __init__(self, form: str, alpha: float) -> None:
        super().__init__()
        self.form, self.alpha = form, nn.Parameter(torch.tensor(alpha))
        self.w, self.b = nn.Parameter(torch.rand(WIDTH) + 0.5), nn.Parameter(torch.rand(WIDTH))
        self.fc, self.out = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = self.fc(x)
        bent = {
            "tanh": lambda: torch.tanh(self.alpha * x) * self.w + self.b,
            "place": lambda: (self.alpha * x).tanh_() * self.w,
            "addcmul": lambda: torch.addcmul(self.b, self.w, torch.tanh(x * self.alpha)),
            "hard": lambda: nn.functional.hardtanh(self.alpha * x) * self.w,
            "wide": lambda: nn.functional.hardtanh(self.alpha * x, -3.0, 3.0) * self.w,
            "quotient": lambda: self.w * (self.alpha * x / (1 + (self.alpha * x).abs())),
        }[self.form]()
        return x + self.out(bent)


@pytest.mark.parametrize("form", ["tanh", "place", "addcmul", "hard"])
@pytest.mark.parametrize("alpha", [0.5, 30.0])
def test_maps_that_are_written_out_are_seen_at_their_bend(form: str, alpha: float) -> None:
    torch.manual_seed(0)
    model, x = Written(form, alpha).eval(), inputs()
    (found,) = measured(model, x)
    with torch.no_grad():
        given = alpha * model.fc(x)
    z = given.clamp(-1, 1) if form == "hard" else given.tanh()
    assert found.path.partition(":")[0] == ".#" + {"hard": "hardtanh", "place": "tanh_"}.get(form, "tanh")
    assert found.input_rms == pytest.approx(float(given.square().mean().sqrt()), rel=1e-5)
    assert found.output_rms == pytest.approx(float(z.square().mean().sqrt()), rel=1e-5)
    assert found.saturated == pytest.approx(float((z.abs() > 0.99).double().mean()))


def test_a_map_with_other_limits_is_measured_by_these() -> None:
    """Most of what hardtanh(x, -3, 3) is given here lies between 1 and 3, where nothing is at a limit."""
    torch.manual_seed(0)
    model, x = Written("wide", 3.0).eval(), inputs()
    (found,) = measured(model, x)
    with torch.no_grad():
        z = (3.0 * model.fc(x)).clamp(-3, 3) / 3
    assert found.limit == 3.0
    assert found.output_rms == pytest.approx(float(z.square().mean().sqrt()), rel=1e-5)
    assert found.saturated == pytest.approx(float((z.abs() > 0.99).double().mean()))
    assert found.saturated < 0.2 < float((z.abs() > 0.99 / 3).double().mean())
    assert not [f for f in normprobe.probe(model, x).findings if f.code == "NP802"]
    low = Written("wide", 1e-3).eval()
    (straight,) = [f for f in normprobe.probe(low, x).findings if f.code == "NP802"]
    assert "it is the straight line 1 · x" in straight.message


def test_what_is_bent_by_several_operations_in_a_forward_is_skipped() -> None:
    report = normprobe.probe(Written("quotient", 0.5), inputs())
    (bare,) = [norm.path for norm in report.anatomy.norms if norm.kind == "dyt"]
    assert report.measurements.bounded_norms == ()
    assert [one.what for one in report.skipped if one.what.startswith("inputs of")] == [f"inputs of {bare}"]


def test_norms_of_other_kinds_are_left_out() -> None:
    assert measured(nn.Sequential(nn.LayerNorm(WIDTH), nn.Tanh()), inputs()) == ()
    rule = zoo.Rule(lambda self, x: self.w * torch.tanh(self.a * x), w=torch.rand(WIDTH) + 1, a=torch.tensor(0.7))
    assert len(measured(nn.Sequential(rule, nn.Linear(WIDTH, 4)), inputs())) == 1


def test_a_gain_of_zeros_tells_nothing() -> None:
    bent = Bent(WIDTH)
    bent.weight.data.zero_()
    report = normprobe.probe(nn.Sequential(bent, nn.Linear(WIDTH, 4)), inputs())
    assert report.measurements.bounded_norms == ()
    assert [one.why for one in report.skipped if one.what == "inputs of 0"] == ["all of its gain is 0"]


def test_nan_stays_nan() -> None:
    (found,) = measured(nn.Sequential(Bent(WIDTH), nn.Linear(WIDTH, 4)), inputs() * math.nan)
    assert math.isnan(found.output_rms)


def test_the_forward_is_left_as_it_was() -> None:
    model = nn.Sequential(Bent(WIDTH), nn.Linear(WIDTH, 4)).eval()
    x = inputs()
    before = model(x)
    measured(model, x)
    assert torch.equal(model(x), before)
    assert "forward" not in vars(model[0])
