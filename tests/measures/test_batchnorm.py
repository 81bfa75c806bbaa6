"""Batch norms: numbers against an independent float64 computation, and what is told about stored statistics."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import normprobe
from normprobe import theory
from normprobe.measures import batchnorm
from normprobe.records import Skipped
from normprobe.records.batchnorm import BatchNormMeasure, BatchNormSite
from normprobe.report.tables import tables


class Net(nn.Module):
    """A residual network with two batch norms and a dropout that train mode would wake."""

    def __init__(self, norm: Callable[[int], nn.Module] = nn.BatchNorm2d) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.stem, self.first = nn.Conv2d(3, 6, 3, padding=1), norm(6)
        self.conv, self.second = nn.Conv2d(6, 6, 3, padding=1), norm(6)
        self.drop, self.head = nn.Dropout(0.5), nn.Linear(6, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(self.stem(x)).relu()
        x = x + self.second(self.conv(x))
        return self.head(self.drop(x.mean((2, 3))))


def batch(rows: int = 4, seed: int = 1) -> Tensor:
    return torch.randn(rows, 3, 6, 6, generator=torch.Generator().manual_seed(seed)) * 1.7 + 0.4


def trained(model: nn.Module, steps: int = 5) -> nn.Module:
    model.train()
    for step in range(steps):
        model(torch.randn(8, 3, 6, 6, generator=torch.Generator().manual_seed(100 + step)))
    return model.eval()


def measured(model: nn.Module, x: Any) -> tuple[BatchNormMeasure, tuple[Skipped, ...]]:
    report = normprobe.probe(model, x, measures=("batchnorm",))
    found = report.data.measurements.batchnorm
    assert found is not None
    return found, report.skipped


def inputs_of(model: Net, x: Tensor) -> dict[str, Tensor]:
    """What reaches each batch norm in eval mode, in float64."""
    seen: dict[str, Tensor] = {}
    twin = copy.deepcopy(model).double().eval()
    for name in ("first", "second"):
        twin.get_submodule(name).register_forward_pre_hook(lambda m, args, name=name: seen.update({name: args[0]}))
    with torch.no_grad():
        twin(x.double())
    return seen


def test_statistics_of_the_batch_against_the_stored_ones() -> None:
    model, x = trained(Net()), batch()
    found, _ = measured(model, x)
    assert [site.path for site in found.sites] == ["first", "second"]
    assert found.basis.count == 4
    for site in found.sites:
        values, norm = inputs_of(model, x)[site.path].transpose(0, 1).flatten(1), model.get_submodule(site.path)
        scale = norm.running_var.double() + norm.eps
        shift = (values.mean(1) - norm.running_mean.double()) / scale.sqrt()
        ratio = (values.var(1) + norm.eps) / scale
        distance = (ratio - 1 - ratio.log() + shift**2) / 2
        assert site.kept is not None
        assert (site.channels, site.count, site.kept.worst_channel) == (6, 4 * 36, int(distance.argmax()))
        assert site.kept.mean_shift == pytest.approx(float(shift.abs().quantile(0.5)), rel=1e-5)
        assert site.kept.mean_shift_max == pytest.approx(float(shift.abs().amax()), rel=1e-5)
        assert site.kept.variance_ratio == pytest.approx(float(ratio.quantile(0.5)), rel=1e-5)
        assert site.kept.variance_ratio_min == pytest.approx(float(ratio.amin()), rel=1e-5)
        assert site.kept.variance_ratio_max == pytest.approx(float(ratio.amax()), rel=1e-5)
        assert site.kept.divergence == pytest.approx(float(distance.quantile(0.5)), rel=1e-5)
        assert site.kept.divergence_max == pytest.approx(float(distance.amax()), rel=1e-5)


def test_outputs_in_train_mode_of_the_batch_norms_alone_and_of_halves() -> None:
    model, x = trained(Net()), batch()
    found, _ = measured(model, x)
    twin = copy.deepcopy(model).double()
    with torch.no_grad():
        plain = twin(x.double())
        twin.first.train()
        twin.second.train()
        whole = twin(x.double())
        halves = torch.cat([twin(part) for part in x.double().split(2)])
    assert found.train_eval_gap == pytest.approx(float((whole - plain).norm() / plain.norm()), rel=1e-4)
    assert found.halves_gap == pytest.approx(float((halves - whole).norm() / whole.norm()), rel=1e-4)


def test_a_batch_that_agrees_with_the_stored_statistics_has_no_gap() -> None:
    model, x = Net(), batch()
    for norm in (model.first, model.second):  # the second sees what the first gives with its final statistics
        norm.momentum = 1.0
    model.train()(x)
    for norm in (model.first, model.second):
        norm.running_var.mul_(143 / 144)  # the norm itself divides by the biased variance
    found, _ = measured(model.eval(), x)
    assert found.train_eval_gap == pytest.approx(0.0, abs=1e-5)
    assert all(site.kept.mean_shift_max < 1e-4 for site in found.sites if site.kept)
    assert found.halves_gap is not None
    assert found.halves_gap > 0.01


class Activated(nn.BatchNorm2d):
    """A batch norm that ends in an activation."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).relu()


class Fixed(nn.Module):
    """Stored statistics under names of their own, in train mode too."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        for name in ("a", "b", "c", "d"):
            self.register_buffer(name, torch.rand(channels, generator=torch.Generator().manual_seed(ord(name))) + 0.5)

    def forward(self, x: Tensor) -> Tensor:
        scale = self.a * (self.d + 1e-5).rsqrt()
        return x * scale[:, None, None] + (self.b - self.c * scale)[:, None, None]


def first(model: nn.Module) -> BatchNormSite:
    return measured(model, batch())[0].sites[0]


@pytest.mark.parametrize("norm", [nn.BatchNorm2d, Activated])
def test_momentum_and_what_is_left_of_the_first_values(norm: Callable[..., nn.Module]) -> None:
    site = first(trained(Net(lambda channels: norm(channels, momentum=0.2))))
    assert (site.keeps, site.default, site.finite, site.momentum, site.tracked) == ("moving", False, True, 0.2, 5)
    assert site.initial_share == pytest.approx(0.8**5)


def test_a_cumulative_average_has_no_momentum() -> None:
    site = first(trained(Net(lambda channels: nn.BatchNorm2d(channels, momentum=None))))
    assert (site.keeps, site.momentum, site.tracked, site.initial_share) == ("moving", None, 5, None)
    assert site.kept is not None


def test_statistics_that_were_never_moved_that_are_broken_and_that_are_not_kept() -> None:
    fresh = first(Net())
    assert (fresh.default, fresh.finite, fresh.tracked, fresh.initial_share) == (True, True, 0, 1.0)
    broken = trained(Net())
    broken.first.running_var[2] = float("inf")
    site = first(broken)
    assert (site.default, site.finite, site.kept) == (False, False, None)
    none = first(Net(lambda channels: nn.BatchNorm2d(channels, track_running_stats=False)))
    assert (none.keeps, none.default, none.finite, none.tracked, none.kept) == ("none", None, None, None, None)


def test_variances_that_eps_drowns_are_counted() -> None:
    model = trained(Net())
    assert first(model).below_eps == 0
    model.first.running_var[1], model.first.running_var[4] = 0.0, 0.9e-5
    model.second.running_var.fill_(1.1e-5)
    found, _ = measured(model, batch())
    assert [site.below_eps for site in found.sites] == [2, 0]
    site = found.sites[0]
    assert site.kept is not None
    assert site.kept.worst_channel in (1, 4)
    values = inputs_of(model, batch())["first"].transpose(0, 1).flatten(1)[1]
    assert site.kept.variance_ratio_max >= float((values.var() + 1e-5) / 1e-5) * (1 - 1e-5)
    none = first(Net(lambda channels: nn.BatchNorm2d(channels, track_running_stats=False)))
    assert none.below_eps is None


def test_the_report_says_whether_stored_statistics_are_as_they_were(monkeypatch: pytest.MonkeyPatch) -> None:
    def caption(model: nn.Module) -> str:
        *_, table = tables(normprobe.probe(model, batch(), measures=("batchnorm",)).data)
        return table.caption

    model = trained(Net())
    model.second.running_mean[0] = float("nan")
    assert caption(model).endswith("; stored statistics left as they were")
    guard = batchnorm.untouched

    @contextmanager
    def careless(given: nn.Module) -> Iterator[Any]:
        with guard(given) as keeper:
            yield keeper
        model.first.running_mean.add_(1.0)

    monkeypatch.setattr(batchnorm, "untouched", careless)
    assert caption(model).endswith("; stored statistics CHANGED BY LOOKING")


def test_rows_say_what_is_stored() -> None:
    model = trained(Net(lambda channels: nn.BatchNorm2d(channels, momentum=0.25)))
    model.first.running_var[1] = 0.0
    model.second.running_var[0] = float("nan")
    *_, table = tables(normprobe.probe(model, batch(), measures=("batchnorm",)).data)
    rows = {row[0]: dict(zip(table.columns, row, strict=True)) for row in table.rows}
    assert list(rows) == ["second", "first"]
    assert rows["first"]["stored"] == "moving, 1 of 6 below eps"
    assert (rows["first"]["momentum"], rows["first"]["batches seen"]) == ("0.25", "5")
    assert (rows["second"]["stored"], rows["second"]["shift"]) == ("not finite", "-")
    fresh = Net(lambda channels: nn.BatchNorm2d(channels, momentum=None))
    *_, table = tables(normprobe.probe(fresh, batch(), measures=("batchnorm",)).data)
    assert [row[2:5] for row in table.rows] == 2 * [("default", "average", "0")]


def test_statistics_that_are_used_in_train_mode_too() -> None:
    model, x = Net(Fixed), batch()
    found, _ = measured(model, x)
    site, values = found.sites[0], inputs_of(model, x)["first"].transpose(0, 1).flatten(1)
    assert (site.keeps, site.momentum, site.tracked) == ("fixed", None, None)
    assert site.kept is not None
    shift = (values.mean(1) - model.first.c.double()) / (model.first.d.double() + 1e-5).sqrt()
    assert site.kept.mean_shift_max == pytest.approx(float(shift.abs().amax()), rel=1e-5)
    assert (found.train_eval_gap, found.halves_gap) == (0.0, pytest.approx(0.0, abs=1e-6))


def test_a_norm_that_runs_twice_is_measured_over_both() -> None:
    model = Net()
    model.second = model.first
    site = first(model)
    values = [inputs_of(Net(), batch())["first"]]
    assert site.count == 2 * 4 * 36
    assert values[0].shape == (4, 6, 6, 6)
    conv = model.conv.double()(model.first.double().eval()(values[0]).relu()).detach()
    both = torch.cat([values[0], conv]).transpose(0, 1).flatten(1)
    assert site.kept is not None
    assert site.kept.variance_ratio == pytest.approx(float(both.var(1).quantile(0.5)), rel=1e-4)
    assert site.kept.mean_shift_max == pytest.approx(float(both.mean(1).abs().amax()), rel=1e-4)


def test_what_one_sample_cannot_show_is_said() -> None:
    found, skipped = measured(Net(), batch(1))
    assert found.halves_gap is None
    assert Skipped(what="batchnorm, half the batch", why="the batch has one sample") in skipped
    flat = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 2))
    found, skipped = measured(flat, torch.randn(1, 4))
    assert (found.train_eval_gap, found.sites[0].kept) == (None, None)
    assert any("train against eval mode" in s.what and "more than 1 value per channel" in s.why for s in skipped)


def test_a_model_without_batch_norm() -> None:
    report = normprobe.probe(nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4)), torch.randn(2, 4), measures=["batchnorm"])
    assert report.data.measurements.batchnorm is None
    assert Skipped(what="batchnorm", why="the model runs no batch norm") in report.skipped


@pytest.mark.parametrize(("shift", "ratio"), [(0.0, 1.0), (0.7, 0.2), (-3.0, 5.0)])
def test_divergence_of_two_normal_distributions(shift: float, ratio: float) -> None:
    one = torch.distributions.Normal(1.0 + 2.0 * shift, 2.0 * ratio**0.5)
    expected = torch.distributions.kl_divergence(one, torch.distributions.Normal(1.0, 2.0))
    assert theory.gaussian_divergence(shift, ratio) == pytest.approx(float(expected), abs=1e-5)


@pytest.mark.parametrize("ratio", [0.0, float("inf")])
def test_divergence_of_a_variance_that_vanished(ratio: float) -> None:
    assert theory.gaussian_divergence(0.5, ratio) == float("inf")


def test_the_table_has_the_farthest_first() -> None:
    model = trained(Net())
    model.second.running_mean.add_(50.0)
    report = normprobe.probe(model, batch(), measures=("batchnorm",))
    *_, table = tables(report.data)
    assert [row[0] for row in table.rows] == ["second", "first"]
    assert all(len(row) == len(table.columns) for row in table.rows)
    assert "train and eval mode differ by" in table.caption


def test_what_is_stored_is_known_without_a_pass_of_its_own() -> None:
    """The level itself tells all but the gaps, and the same as the measure that was asked for."""
    model, x = trained(Net()), batch()
    asked, _ = measured(model, x)
    report = normprobe.probe(model, x)
    found = report.data.measurements.batchnorm
    assert found == asked.model_copy(update={"train_eval_gap": None, "halves_gap": None})
    assert found is not None
    assert found.sites[0].kept is not None
    assert found.untouched
    *_, table = tables(report.data)
    assert table.caption == "statistics of the batch against the stored ones; stored statistics left as they were"
    assert normprobe.probe(model, x, level="structure").data.measurements.batchnorm is None


def test_flags_are_those_that_the_model_was_given_with() -> None:
    model = Net()
    model.train()
    model.second.eval()
    model.second.requires_grad_(False)
    for measures in ((), ("batchnorm",)):
        found = normprobe.probe(model, batch(), measures=measures).data.measurements.batchnorm
        assert found is not None
        assert (found.training, found.others_learn, found.processes) == (True, True, 1)
        assert [(site.training, site.learns) for site in found.sites] == [(True, True), (False, False)]
        assert [(site.shape, site.synchronised) for site in found.sites] == 2 * [((4, 6, 6, 6), False)]
    plain = Net(lambda channels: nn.BatchNorm2d(channels, affine=False)).requires_grad_(False)
    found = normprobe.probe(plain, batch()).data.measurements.batchnorm
    assert found is not None
    assert (found.others_learn, found.sites[0].learns) == (False, None)


def test_variances_of_zero_are_counted() -> None:
    model = trained(Net())
    model.first.running_var[1], model.first.running_var[4] = 0.0, 0.9e-5
    site = first(model)
    assert (site.zero_variances, site.below_eps) == (1, 2)


class Masked(nn.Module):
    """Tokens through a batch norm of channels first, or of all tokens together."""

    def __init__(self, flat: bool) -> None:
        super().__init__()
        self.flat, self.embed, self.norm = flat, nn.Embedding(11, 4), nn.BatchNorm1d(4)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        x = self.embed(input_ids)
        return self.norm(x.flatten(0, 1)) if self.flat else self.norm(x.mT)


@pytest.mark.parametrize("flat", [False, True])
def test_padding_behind_a_statistic_is_counted(flat: bool) -> None:
    mask = torch.ones(3, 5, dtype=torch.long)
    for hidden in (0, 3):
        mask[1, 5 - hidden :] = 0
        inputs = {"input_ids": torch.arange(15).view(3, 5) % 11, "attention_mask": mask}
        found = normprobe.probe(Masked(flat), inputs).data.measurements.batchnorm
        assert found is not None
        assert (found.sites[0].padding, found.sites[0].count) == (hidden, 15)
