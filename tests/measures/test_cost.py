"""The cost of norms: counts against sums by hand, and times against a norm that is slow on purpose."""

from __future__ import annotations

import math
import time
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import normprobe
from normprobe.measures.cost import Cost, one_token
from normprobe.measures.extra import Subject
from normprobe.records import Skipped
from normprobe.records.cost import CostMeasure, NormCost
from normprobe.report.tables import tables
from tests.measures.models import anatomy_of
from tests.models import MODELS
from tests.test_no_trace import lived_in
from tests.trace import Snapshot


def measured(model: nn.Module, x: Any) -> CostMeasure:
    found = normprobe.probe(model, x, measures=("cost",)).data.measurements.cost
    assert found is not None
    return found


class Eager(nn.Module):
    """An RMSNorm of five operations: square, mean, sum with eps, inverse root, two products."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(8))

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * self.weight


def only(model: nn.Module, x: Tensor) -> NormCost:
    (found,) = measured(model, x).norms
    return found


X = torch.randn(4, 6, 8, generator=torch.Generator().manual_seed(0))
ALL, ROWS, WEIGHT = 4 * 6 * 8 * 4, 4 * 6 * 4, 8 * 4  # bytes


def test_operations_and_bytes_of_a_norm_written_out() -> None:
    found = only(nn.Sequential(nn.Linear(8, 8), Eager()), X)
    assert (found.path, found.calls, found.operations, found.reductions, found.fused) == ("1", 1, 6, 1, False)
    square, mean, rest = 2 * ALL, ALL + ROWS, 4 * ROWS
    assert found.bytes_moved == square + mean + rest + (2 * ALL + ROWS) + (2 * ALL + WEIGHT)
    assert found.bytes_needed == 2 * ALL + WEIGHT


def test_a_fused_norm_is_one_operation() -> None:
    found = only(nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8)), X)
    assert (found.operations, found.reductions, found.fused) == (1, 1, True)
    assert found.bytes_needed == 2 * ALL + 2 * WEIGHT
    assert found.bytes_moved == found.bytes_needed + 2 * ROWS  # it gives mean and inverse deviation as well


def test_a_norm_that_runs_twice_counts_twice() -> None:
    norm = Eager()
    found = only(nn.Sequential(norm, nn.Linear(8, 8), norm), X)
    assert (found.calls, found.operations) == (2, 12)


class Slow(nn.LayerNorm):
    def forward(self, x: Tensor) -> Tensor:
        time.sleep(0.02)
        return super().forward(x)


class Waits(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        time.sleep(0.06)
        return super().forward(x)


def test_time_in_norms_over_time_of_the_forward() -> None:
    found = measured(nn.Sequential(Slow(8), Waits(8, 8)), X)
    assert found.norms[0].seconds >= 0.02
    assert found.forward_seconds >= 0.08
    assert found.share == pytest.approx(0.25, abs=0.15)
    assert (found.device, found.basis.unit, found.basis.count) == ("cpu", "s", 5)


class Clocked(nn.Module):
    """Runs what it holds, and lets a clock go on by the seconds of its next run."""

    def __init__(self, held: nn.Module, clock: list[float], seconds: list[float]) -> None:
        super().__init__()
        self.held, self.clock, self.seconds = held, clock, seconds

    def forward(self, x: Tensor) -> Tensor:
        self.clock[0] += self.seconds.pop(0) if self.seconds else 0.0
        return self.held(x)


def clocked(monkeypatch: pytest.MonkeyPatch, outer: list[float], inner: list[float]) -> CostMeasure:
    """A norm inside a norm, whose own seconds in the six timed forwards are given, beside 7 s of anything else."""
    clock = [0.0]
    monkeypatch.setattr("normprobe.measures.cost._now", lambda device: clock[0])
    rest = Clocked(nn.Linear(8, 8), clock, [0.0, *[7.0] * 6])
    model = nn.Sequential(rest, Clocked(Clocked(nn.LayerNorm(8), clock, [0.0, *inner]), clock, [0.0, *outer]))
    anatomy = anatomy_of(model, X)
    (norm,) = anatomy.norms
    norms = tuple(norm.model_copy(update={"path": path}) for path in ("1", "1.held"))
    rest.seconds, model[1].seconds, model[1].held.seconds = [0.0, *[7.0] * 6], [0.0, *outer], [0.0, *inner]
    found, _ = Cost().measure(Subject(model, X, anatomy.model_copy(update={"norms": norms})))
    assert found is not None
    return found


def test_a_norm_inside_a_norm_counts_once(monkeypatch: pytest.MonkeyPatch) -> None:
    found = clocked(monkeypatch, outer=[2.0] * 6, inner=[1.0] * 6)
    assert [norm.seconds for norm in found.norms] == [2.0, 1.0]
    assert (found.forward_seconds, found.share) == (10.0, 0.3)


def test_shares_of_norms_add_up_to_that_of_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """All of the fastest forward; the least of each over the forwards would be 1 and 1 s."""
    found = clocked(monkeypatch, outer=[0, 1, 4, 2, 3, 9], inner=[0, 9, 1, 1, 3, 1])
    assert found.forward_seconds == 10
    assert [norm.seconds for norm in found.norms] == [2, 1]
    assert found.share == math.fsum(norm.seconds for norm in found.norms) / found.forward_seconds


def test_one_token_of_one_sample() -> None:
    ids = torch.tensor([[5, 6, 7], [8, 9, 10]])
    cut = one_token({"input_ids": ids, "attention_mask": torch.ones_like(ids), "flag": True})
    assert isinstance(cut, dict)
    assert cut["input_ids"].tolist() == [[5]]
    assert cut["attention_mask"].tolist() == [[1]]
    assert cut["flag"] is True
    assert one_token(X) is None
    assert one_token({"a": ids, "b": ids[:, :2]}) is None


@pytest.mark.parametrize("name", ["llama", "bert", "gemma2", "decoder_rms"])
def test_every_kind_of_model_is_measured_and_left_as_it_was(name: str) -> None:
    model, inputs = lived_in(MODELS[name]())
    before = Snapshot(model, inputs)
    found = measured(model, inputs)
    before.assert_kept()
    assert 0 < found.share < 1
    assert found.one_token_share is not None
    assert 0 < found.one_token_share < 1
    assert all(each.operations > 0 and each.seconds > 0 for each in found.norms)


def test_what_has_no_tokens_or_no_norm_is_said() -> None:
    report = normprobe.probe(nn.Sequential(Eager(), nn.Linear(8, 8)), X, measures=("cost",))
    why = "only token ids are cut to one token: tables [batch, tokens], all inputs of one size"
    assert Skipped(what="cost of one token", why=why) in report.skipped
    bare = normprobe.probe(nn.Sequential(nn.Linear(8, 8)), X, measures=("cost",))
    assert Skipped(what="cost", why="the model runs no norm that is a module") in bare.skipped


def test_norms_that_are_no_modules_are_named_beside_those_that_are() -> None:
    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.layer = nn.LayerNorm(8), nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            return nn.functional.layer_norm(self.layer(self.norm(x)), (8,))

    report = normprobe.probe(Mixed(), X, measures=("cost",))
    assert report.measurements.cost is not None
    assert [norm.path for norm in report.measurements.cost.norms] == ["norm"]
    assert Skipped(what="cost of norm .#native_layer_norm:0", why="it is no module") in report.skipped


def test_the_table_has_the_slowest_first() -> None:
    report = normprobe.probe(nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 8), Slow(8)), X, measures=("cost",))
    *_, table = tables(report.data)
    assert [row[0] for row in table.rows] == ["2", "0"]
    assert all(len(row) == len(table.columns) for row in table.rows)
