"""The six classic results: all hold here, and each fails where the thing that it rests on is broken."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from typer.testing import CliRunner

from normprobe import stats, theory
from normprobe.cli.commands import app
from normprobe.records.verification import Verified
from normprobe.verifying import forms, models, norms, signal
from normprobe.verifying.judging import Claim
from normprobe.verifying.models import stack
from normprobe.verifying.run import RESULTS, verify


def failed(results: Iterator[Verified]) -> set[str]:
    return {one.id for one in results if not one.ok}


@pytest.fixture(scope="module")
def everything() -> tuple[Verified, ...]:
    return verify()


def test_all_results_hold(everything: tuple[Verified, ...]) -> None:
    assert [one.id for one in everything if not one.ok] == []
    assert len({one.result for one in everything}) == 6
    assert len({one.id for one in everything}) == len(everything)


def test_the_figures_that_everyone_quotes(everything: tuple[Verified, ...]) -> None:
    measured = {one.id: one.measured for one in everything}
    assert measured["relu-kaiming"] == pytest.approx(1.0, abs=0.005)
    assert measured["relu-lecun"] == pytest.approx(0.5, abs=0.005)
    assert measured["growth-unscaled"] == pytest.approx(51, rel=0.02)
    assert measured["growth-scaled"] == pytest.approx(1.5, rel=0.02)
    assert measured["pre-norm-gradients"] == pytest.approx(0.40, abs=0.02)
    assert 1.7 < measured["post-norm-gradients"] < 2.4


def test_torch_is_left_as_it_was() -> None:
    state = torch.get_rng_state()
    list(verify_only("relu"))
    assert torch.equal(torch.get_rng_state(), state)


def verify_only(name: str) -> Iterator[Verified]:
    with torch.random.fork_rng(devices=()):
        yield from RESULTS[name]()


@pytest.mark.parametrize(("measured", "ok"), [(2.0, True), (2.5, True), (2.6, False), (math.nan, False)])
def test_a_number_is_ok_within_its_tolerance_only(measured: float, ok: bool) -> None:
    claim = Claim("a", "b", "c", expected=2.0, tolerance=0.5, source="choice")
    assert claim.judged(measured).ok is ok


def no_mean(self: Any, x: Tensor) -> Tensor:
    rows = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps)
    return rows * self.weight + self.bias if self.weight is not None else rows


def unbiased(self: Any, x: Tensor) -> Tensor:
    deviation = x - x.mean(-1, keepdim=True)
    return deviation / (x.var(-1, keepdim=True) + self.eps).sqrt() * self.weight + self.bias


def outside(self: Any, x: Tensor) -> Tensor:
    rows = x / (x.square().mean(-1, keepdim=True).sqrt() + self.eps)
    return rows * self.weight if self.weight is not None else rows


@pytest.mark.parametrize(
    ("broken", "forward", "ids"),
    [
        (nn.LayerNorm, no_mean, {"layernorm-from-scratch", "layernorm-read-alike", "layernorm-shift"}),
        (models.LayerNormByHand, unbiased, {"layernorm-from-scratch", "layernorm-read-alike"}),
        (models.RMSNormByHand, outside, {"rmsnorm-from-scratch", "rmsnorm-read-alike"}),
        (nn.RMSNorm, lambda self, x: x * self.weight, {"rmsnorm-from-scratch", "rmsnorm-read-alike", "rmsnorm-shift"}),
    ],
)
def test_a_broken_norm_is_seen(
    monkeypatch: pytest.MonkeyPatch, broken: type[nn.Module], forward: Callable[..., Tensor], ids: set[str]
) -> None:
    monkeypatch.setattr(broken, "forward", forward)
    assert failed(norms.norms()) | failed(norms.shifts()) == ids


def test_a_batchnorm_that_forgets_its_mode_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    def always_training(self: nn.BatchNorm1d, x: Tensor) -> Tensor:
        return nn.functional.batch_norm(x, None, None, self.weight, self.bias, True, eps=self.eps)

    monkeypatch.setattr(nn.BatchNorm1d, "forward", always_training)
    assert {"batchnorm-eval", "batchnorm-gap-1"} <= failed(norms.batchnorm())


def test_a_broken_initialisation_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(theory, "lecun_std", lambda fan_in: 1.2 / math.sqrt(fan_in))
    assert failed(signal.growth()) == {"growth-unscaled", "growth-scaled"}
    monkeypatch.setattr(theory, "kaiming_std", theory.lecun_std)
    results = list(signal.relu())
    assert [one.measured for one in results] == pytest.approx([0.72, 0.72], rel=0.02)


def test_a_broken_measure_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    right = stats.medians
    monkeypatch.setattr(stats, "medians", lambda rows: tuple(1.05 * value for value in right(rows)))
    assert failed(signal.relu()) == {"relu-kaiming", "relu-lecun"}


def test_gradients_are_those_of_an_independent_computation() -> None:
    torch.manual_seed(0)
    inputs = torch.randn(16, 64)
    model = stack(48, 64, nn.GELU(), post=True).double()
    model(inputs.double()).square().mean().backward()
    first, last = (model[i].linear.weight.grad.norm() for i in (0, 47))
    assert signal._ratios(True)[0] == pytest.approx(float(last / first), rel=0.02)


def test_a_norm_that_is_left_out_changes_the_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(signal, "_SEEDS", range(1))
    monkeypatch.setattr(nn.LayerNorm, "forward", lambda self, x: x)
    assert failed(signal.gradients()) == {"pre-norm-gradients", "post-norm-gradients"}


def test_closed_forms() -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(100_000, generator=generator, dtype=torch.float64)
    shifted = (x + 2) / (x + 2).square().mean().sqrt()
    assert forms.rmsnorm_shift_change(2) == pytest.approx(float((shifted - x).norm() / x.norm()), rel=0.01)
    assert forms.rmsnorm_shift_change(0) == 0
    assert forms.batchnorm_gap(3, 2, 1.0, 1) == pytest.approx(0)
    assert forms.batchnorm_gap(3, 2, 0.1, 0) == pytest.approx(math.hypot(1, 3) / math.hypot(2, 3))
    assert forms.relu_second_moment(theory.kaiming_std(7) ** 2, 7) == pytest.approx(1)
    assert theory.independent_growth([theory.residual_init_factor(50)] * 50, 1.0) ** 2 == pytest.approx(1.5)


def result(measured: float) -> Verified:
    return Claim("an-id", "a result", "a claim", 2.0, 0.5, "choice").judged(measured, "a note")


@pytest.mark.parametrize(("measured", "code"), [(2.1, 0), (3.0, 1), (math.inf, 1)])
def test_the_command_exits_with_1_where_a_number_is_off(
    monkeypatch: pytest.MonkeyPatch, measured: float, code: int
) -> None:
    monkeypatch.setattr("normprobe.verifying.run.verify", lambda progress: (result(2.0), result(measured)))
    told = CliRunner().invoke(app, ["verify"])
    assert told.exit_code == code
    assert "a result" in told.stdout
    assert ("no" in told.stdout.split()) is bool(code)
    document = json.loads(CliRunner().invoke(app, ["verify", "--format", "json"]).stdout)
    assert document[0] | {"id": "an-id", "measured": 2.0, "expected": 2.0, "tolerance": 0.5, "ok": True} == document[0]
    assert document[1]["ok"] is (code == 0)
